"""What models say of the tokens of rollouts, before these are trained."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from strop.data.collate import Batch
from strop.rollout.buffer import Experience
from strop.rollout.types import Rollout

logger = logging.getLogger(__name__)

EXACT = 1e-5
"""How far apart, in nats, log-probabilities of the generator and of a training forward may be to count as the same."""


@dataclass
class LookUp:
    """Asks a model about rollouts, `size` at a time. All processes call it alike; one of them has `largest` rollouts.

    `batch_of` gives a batch on the device, `autocast` what models compute under.
    """

    size: int
    batch_of: Callable[[Sequence[Experience]], Batch]
    autocast: Callable[[], AbstractContextManager]

    def ask(self, rollouts: Sequence[Rollout], largest: int, read: Callable[[Batch], Any], *names: str) -> None:
        """Set `names` of each rollout to what `read` says of its tokens, as many (B, T); 0 in the prompt."""
        for start in range(0, max(largest, 1), self.size):
            part = rollouts[start : start + self.size]
            batch = self.batch_of([Experience.of(rollout) for rollout in part])
            with torch.no_grad(), self.autocast():  # the reference computes as the policy does
                found = read(batch)
            several = [found] if isinstance(found, Tensor) else found
            for name, values in zip(names, map(iter, (x.tolist() for x in several)), strict=True):
                for rollout in part:
                    length = len(rollout.completion_ids)
                    own = next(values)[:length] if length else []
                    setattr(rollout, name, [0.0] * rollout.prompt_length + own)

    def known(self, rollouts: Sequence[Rollout]) -> tuple[bool, bool]:
        """Whether the generator has said log-probabilities of all tokens that were written, and of any, on all
        processes."""
        said = [logp == logp for r in rollouts for logp, m in zip(r.logps, r.completion_mask, strict=True) if m]
        everywhere = gather_object([(all(said), any(said))])
        return all(every for every, _ in everywhere), any(some for _, some in everywhere)

    def is_exact(self, rollouts: Sequence[Rollout], largest: int, read: Callable[[Batch], Tensor]) -> bool:
        """Whether the generator's log-probabilities of the first rollouts are those of the policy that `read` reads."""
        some = rollouts[: self.size]
        self.ask(some, min(largest, self.size), read, "old_logps")
        gaps = [abs(a - b) for r in some for a, b, m in zip(r.logps, r.old_logps, r.completion_mask, strict=True) if m]
        worst = max(gather_object([max((gap if gap == gap else math.inf for gap in gaps), default=0.0)]))
        for rollout in some:
            rollout.old_logps = None
        logger.info(
            "log-probabilities of the generator and of training differ by %.1e at most: %s",
            worst,
            "the generator's are used" if worst <= EXACT else "old ones are computed where they are needed",
        )
        return worst <= EXACT
