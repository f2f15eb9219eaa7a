"""Losses on preferred and dispreferred completions, each one a line of `PREFERENCE_LOSSES`.

A loss takes `Pairs` and returns one loss a pair, (B,). Log-probabilities are natural logs summed over completion
tokens. `beta` (1/nat) scales the implicit reward log pi/ref; `smoothing` is the chance that a label is flipped.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid, relu


@dataclass(frozen=True, slots=True)
class Pairs:
    """(B,) each: log pi/ref of both completions, and their lengths in trained tokens."""

    chosen: Tensor
    rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def mean_margin(self) -> Tensor:
        """Margin of per-token averages, so that beta means the same at every length."""
        return self.chosen / self.chosen_length - self.rejected / self.rejected_length


def sigmoid(pairs: Pairs, beta: float, smoothing: float = 0.0) -> Tensor:
    """DPO (arXiv:2305.18290 eq. 7); smoothed, it is conservative DPO."""
    z = beta * pairs.margin
    return -(1 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)


def hinge(pairs: Pairs, beta: float) -> Tensor:
    """SLiC on implicit rewards (arXiv:2305.10425; arXiv:2309.06657)."""
    return relu(1 - beta * pairs.margin)


def ipo(pairs: Pairs, beta: float) -> Tensor:
    """Identity preference optimisation (arXiv:2310.12036 eq. 17), on per-token averages."""
    return (pairs.mean_margin - 1 / (2 * beta)) ** 2


PREFERENCE_LOSSES: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (sigmoid, hinge, ipo)}
