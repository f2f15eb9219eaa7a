"""A block of rollouts while it is trained: what the loss reads of each, in which order, and how far it got."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from strop.rollout.plan import BatchPlan
from strop.rollout.types import Rollout


@dataclass(slots=True)
class Experience:
    """What a loss reads of a rollout. Lists have one entry a token of the whole conversation."""

    token_ids: list[int]
    prompt_length: int
    completion_mask: list[int]
    """1 on the tokens that are trained."""
    advantage: float = 0.0
    old_logps: list[float] | None = None
    """log p under the policy that the ratio is taken to; None where that is the policy in training."""
    ref_logps: list[float] | None = None
    sampling_logps: list[float] | None = None
    """log p as another program says that sampled; None where none did."""
    advantages: list[float] | None = None
    """One a token, in the place of `advantage`."""
    returns: list[float] | None = None
    old_values: list[float] | None = None
    """Values under the function that is trained towards `returns`, before that."""
    kl_weight: float = 1.0

    @classmethod
    def of(cls, rollout: Rollout) -> "Experience":
        return cls(rollout.token_ids, rollout.prompt_length, rollout.completion_mask)


@dataclass
class RolloutBuffer:
    """The experiences of a block of all processes, and which micro-batch comes next.

    Groups are trained in an order drawn anew for each pass, their completions together. It is part of checkpoints: a
    run that is resumed in the middle of a block goes on with the same rollouts.
    """

    plan: BatchPlan
    seed: int = 0
    number: int = 0
    """Blocks so far."""
    num_rollouts: int = 0
    """Completions that were written for training so far; their numbers go on from there."""
    experiences: list[Experience] = field(default_factory=list)
    group_size: int = 1
    batches_done: int = 0
    """Micro-batches of this block, all passes counted."""

    @property
    def is_used_up(self) -> bool:
        return self.batches_done >= self.batches_per_pass * self.plan.num_iterations

    @property
    def batches_per_pass(self) -> int:
        return -(-len(self.experiences) // self.plan.completions_per_batch)

    def fill(self, experiences: Sequence[Experience], group_size: int) -> None:
        """Begin a new block, the groups one after the other."""
        self.experiences, self.group_size, self.batches_done = list(experiences), group_size, 0
        self.number += 1

    def next_batch(self, process_index: int) -> list[Experience]:
        """What this process trains next; nothing where the last micro-batch has less than one for each."""
        done, place = divmod(self.batches_done, self.batches_per_pass)
        start = place * self.plan.completions_per_batch + process_index * self.plan.batch_size
        order = self._order(done)
        self.batches_done += 1
        return [self.experiences[i] for i in order[start : start + self.plan.batch_size]]

    def _order(self, iteration: int) -> list[int]:
        groups = list(range(0, len(self.experiences), self.group_size))
        random.Random(f"{self.seed} {self.number} {iteration}").shuffle(groups)
        return [i for start in groups for i in range(start, min(start + self.group_size, len(self.experiences)))]

    def state(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {
            "number": self.number,
            "num_rollouts": self.num_rollouts,
            "group_size": self.group_size,
            "batches_done": self.batches_done,
            "experiences": [] if self.is_used_up else [asdict(one) for one in self.experiences],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was."""
        self.number, self.num_rollouts = state["number"], state["num_rollouts"]
        self.group_size = state["group_size"]
        self.experiences = [Experience(**one) for one in state["experiences"]]
        self.batches_done = state["batches_done"] if self.experiences else 0
