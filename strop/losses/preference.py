"""Losses on preferred and dispreferred completions, each one a line of `PREFERENCE_LOSSES`.

A loss takes `Pairs` and returns one loss a pair, (B,). Log-probabilities are natural logs summed over completion
tokens. `beta` (1/nat) scales the implicit reward log pi/ref; `smoothing` is the chance that a label is flipped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from .reduce import masked_mean, masked_sum

SFT = "sft"
"""A term beside these losses and no loss of a pair: the mean negative log-likelihood of a step's chosen tokens."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """(B,) each: log pi/ref of both completions (without a reference log pi), and their lengths in trained tokens."""

    chosen: Tensor
    rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    reference_margin: Tensor | float = 0.0
    """log ref(chosen) - log ref(rejected), which only `aot` reads."""

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Per-token averages of both sides; 0 for an empty one."""
        return self.chosen / self.chosen_length.clamp(min=1), self.rejected / self.rejected_length.clamp(min=1)

    @property
    def mean_margin(self) -> Tensor:
        """Margin of per-token averages, so that beta means the same at every length."""
        chosen, rejected = self.means
        return chosen - rejected


def logistic(z: Tensor, smoothing: float = 0.0) -> Tensor:
    """-log sigmoid(z), averaged over a label that is flipped with chance `smoothing`."""
    return -(1 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)


def sigmoid(pairs: Pairs, beta: float, smoothing: float = 0.0) -> Tensor:
    """DPO (arXiv:2305.18290 eq. 7); smoothed, it is conservative DPO."""
    return logistic(beta * pairs.margin, smoothing)


def sigmoid_norm(pairs: Pairs, beta: float) -> Tensor:
    """DPO on per-token averages (arXiv:2411.15124)."""
    return logistic(beta * pairs.mean_margin)


def robust(pairs: Pairs, beta: float, smoothing: float = 0.0) -> Tensor:
    """DPO whose mean over flipped labels is that over clean ones (arXiv:2403.00409). Refuses smoothing >= 0.5."""
    if not 0 <= smoothing < 0.5:
        raise ValueError(f"smoothing={smoothing} leaves no label to correct for: robust divides by 1 - 2 * smoothing")
    z = beta * pairs.margin
    return (-(1 - smoothing) * logsigmoid(z) + smoothing * logsigmoid(-z)) / (1 - 2 * smoothing)


def hinge(pairs: Pairs, beta: float) -> Tensor:
    """SLiC on implicit rewards (arXiv:2305.10425; arXiv:2309.06657)."""
    return relu(1 - beta * pairs.margin)


def ipo(pairs: Pairs, beta: float) -> Tensor:
    """Identity preference optimisation (arXiv:2310.12036 eq. 17), on per-token averages."""
    return (pairs.mean_margin - 1 / (2 * beta)) ** 2


def exo_pair(pairs: Pairs, beta: float, smoothing: float = 1e-3) -> Tensor:
    """Exact optimisation: KL from the policy's preference to the label (arXiv:2402.00856 eq. 16).

    Refuses smoothing <= 0, against which this divergence is infinite.
    """
    if not 0 < smoothing < 0.5:
        raise ValueError(f"smoothing={smoothing} makes exo_pair infinite or pointless; take one in (0, 0.5), say 1e-3")
    z = beta * pairs.margin
    agree = z.sigmoid() * (logsigmoid(z) - math.log1p(-smoothing))
    return agree + (-z).sigmoid() * (logsigmoid(-z) - math.log(smoothing))


def nca_pair(pairs: Pairs, beta: float) -> Tensor:
    """Noise-contrastive alignment (arXiv:2402.05369): keeps the chosen likely, not just likelier."""
    chosen, rejected = beta * pairs.chosen, beta * pairs.rejected
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def bco_pair(pairs: Pairs, beta: float) -> Tensor:
    """Each side classified on its own (arXiv:2404.04656), around a baseline of 0."""
    return -logsigmoid(beta * pairs.chosen) - logsigmoid(-beta * pairs.rejected)


def sppo_hard(pairs: Pairs, beta: float) -> Tensor:
    """Self-play with hard labels (arXiv:2405.00675 eq. 4.7): both sides go to +-1 / (2 beta)."""
    return (pairs.chosen - 0.5 / beta) ** 2 + (pairs.rejected + 0.5 / beta) ** 2


def apo_zero(pairs: Pairs, beta: float) -> Tensor:
    """Anchored, for a chosen that is better than the model (arXiv:2408.06266 eq. 7): it goes up."""
    return (-beta * pairs.chosen).sigmoid() + (beta * pairs.rejected).sigmoid()


def apo_down(pairs: Pairs, beta: float) -> Tensor:
    """Anchored, for a chosen that is worse than the model (arXiv:2408.06266 eq. 8): both go down."""
    return (beta * pairs.chosen).sigmoid() + (-beta * pairs.margin).sigmoid()


def discopop(pairs: Pairs, beta: float, tau: float = 0.05) -> Tensor:
    """A blend of logistic and exponential that a search found (arXiv:2406.08414 eq. 5).

    Around a margin of 0 it rises with the margin, between two falling parts, as published.
    """
    z = beta * pairs.margin
    # The product exp(-z) * sigmoid(z / tau) as one exponential: apart they are inf * 0 far on the left.
    return -logsigmoid(z) * (-z / tau).sigmoid() + (logsigmoid(z / tau) - z).exp()


def aot(pairs: Pairs, beta: float, smoothing: float = 0.0) -> Tensor:
    """The policy's margins dominate the reference's, quantile by quantile (arXiv:2406.05882).

    Quantiles are those of all pairs given, so give a whole optimizer step. A pair's loss stands at its own place.
    """
    policy = pairs.margin + pairs.reference_margin
    reference = torch.zeros_like(policy) + pairs.reference_margin
    return _dominance(policy, reference, beta, smoothing)


def aot_unpaired(pairs: Pairs, beta: float, smoothing: float = 0.0) -> Tensor:
    """The chosen dominate the rejected, quantile by quantile, whatever their prompts (arXiv:2406.05882).

    Quantiles are those of all pairs given, so give a whole optimizer step. A loss stands at the place of its chosen;
    its rejected may be another pair's, so only the sum over all has the gradient.
    """
    return _dominance(pairs.chosen, pairs.rejected, beta, smoothing)


def _dominance(better: Tensor, worse: Tensor, beta: float, smoothing: float) -> Tensor:
    ranked, order = better.sort(stable=True)
    losses = logistic(beta * (ranked - worse.sort().values), smoothing)
    return losses[order.argsort()]


PREFERENCE_LOSSES: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        *(sigmoid, sigmoid_norm, robust, hinge, ipo, exo_pair, nca_pair, bco_pair, sppo_hard),
        *(apo_zero, apo_down, discopop, aot, aot_unpaired),
    )
}


def options_of(loss: Callable[..., Tensor]) -> set[str]:
    """Names of the options that `loss(pairs, beta, ...)` has of its own."""
    own = list(signature(loss).parameters.values())[2:]
    return {p.name for p in own if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}


def box_cox(log_value: Tensor, power: float) -> Tensor:
    """(exp(power * log_value) - 1) / power, and `log_value` for power 0.

    The exponent is capped, so that squares of differences stay finite in the dtype; beyond the cap the gradient is 0.
    """
    if power == 0:
        return log_value
    cap = 0.45 * math.log(torch.finfo(log_value.dtype).max)
    return (power * log_value).clamp(max=cap).expm1() / power


def reverse_kl(log_ratio: Tensor) -> Tensor:
    """f'(u) = log u, plain DPO."""
    return log_ratio


def forward_kl(log_ratio: Tensor) -> Tensor:
    """f'(u) = 1 - 1 / u: covers what the reference covers."""
    return box_cox(log_ratio, -1.0)


def js_divergence(log_ratio: Tensor) -> Tensor:
    """f'(u) = log(2 u / (1 + u)): at most log 2."""
    return math.log(2) + logsigmoid(log_ratio)


def alpha_divergence(log_ratio: Tensor, alpha: float = 0.5) -> Tensor:
    """f'(u) = (u^(alpha - 1) - 1) / (alpha - 1): forward KL at 0, reverse KL at 1; 1 - alpha in the paper."""
    return box_cox(log_ratio, alpha - 1)


# f'(pi/ref) as a function of log pi/ref, up to a constant that makes it 0 at 0: f-DPO (arXiv:2309.16240 table 1).
F_DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (reverse_kl, forward_kl, js_divergence, alpha_divergence)
}

DIVERGENCE_LOSSES = frozenset({"sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "exo_pair", "discopop"})
"""Losses that are derived for a reward f'(pi/ref); the others are derived for log pi/ref itself."""


def wpo_weight(logps: Tensor, log_collision: Tensor, mask: Tensor) -> Tensor:
    """How much a completion is the policy's own, (B,), without gradient: WPO (arXiv:2406.11827).

    `logps` and `log_collision` (log of the sum of squared probabilities) are (B, T). A pair's loss is multiplied by
    the weights of both sides.
    """
    return masked_mean(logps.detach() - log_collision.detach(), mask, -1).exp()


def ld_sum(logps: Tensor, mask: Tensor, keep: Tensor, alpha: float) -> Tensor:
    """Log-probability (B,) whose trained tokens beyond the first `keep` (B,) weigh `alpha`: LD-DPO (arXiv:2409.06411).

    `keep` is the length of the pair's shorter completion; alpha 1 gives the plain sum.
    """
    beyond = mask.cumsum(-1) > keep[:, None]
    return masked_sum(torch.where(beyond, alpha * logps, logps), mask, -1)
