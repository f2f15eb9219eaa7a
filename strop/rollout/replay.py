"""Groups that are trained once more, in the place of groups that teach nothing."""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from strop.rollout.buffer import Experience


@dataclass
class ReplayBuffer:
    """The `size` groups whose rewards differed most so far.

    Their old log-probabilities stay those of the policy that wrote them, so ratios tell their age. It is part of
    checkpoints.
    """

    size: int
    seed: int = 0
    groups: list[tuple[float, list[Experience]]] = field(default_factory=list)
    """Standard deviation of the rewards and experiences of each, the largest first."""

    def refill(
        self, experiences: Sequence[Experience], spreads: Sequence[float], number: int
    ) -> tuple[list[Experience], int]:
        """The experiences of block `number` with kept groups in the place of those without a signal, and how many.

        `spreads` has the standard deviation of the rewards of each group. Kept groups come at most once a block, the
        likelier the larger theirs. Afterwards the block's own groups are kept, as far as they are among the largest.
        """
        width = len(experiences) // max(len(spreads), 1)
        groups = [list(experiences[i * width : (i + 1) * width]) for i in range(len(spreads))]
        teaches = [any(one.advantage and any(one.completion_mask) for one in group) for group in groups]
        fresh = [
            (spread, group) for spread, group, yes in zip(spreads, groups, teaches, strict=True) if yes and spread > 0
        ]
        dead = [i for i, yes in enumerate(teaches) if not yes]
        drawn = self._drawn(len(dead), number)
        for i, group in zip(dead, drawn, strict=False):
            groups[i] = group
        self.groups = sorted(self.groups + fresh, key=lambda kept: -kept[0])[: self.size]
        return [one for group in groups for one in group], len(drawn)

    def _drawn(self, count: int, number: int) -> list[list[Experience]]:
        """So many groups, or all there are, drawn without replacement with probabilities like their spreads."""
        dice = random.Random(f"{self.seed} {number}")
        keyed = [(math.log(1 - dice.random()) / spread, i) for i, (spread, _) in enumerate(self.groups)]
        return [self.groups[i][1] for _, i in sorted(keyed, reverse=True)[:count]]

    def state(self) -> list[Any]:
        """All of it, as JSON can hold it."""
        return [[spread, [asdict(one) for one in group]] for spread, group in self.groups]

    def load(self, state: list[Any]) -> None:
        """Go on where `state` was."""
        self.groups = [(spread, [Experience(**one) for one in group]) for spread, group in state]
