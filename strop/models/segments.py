"""How a packed stream is cut into segments, and which segment continues which.

A packed batch has no padding: its rows follow one another in one stream of N tokens. A segment attends causally to
itself and to its ancestors, so a prompt shared by several completions stands in the stream once.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["packed", "padded"]
"""How rows become one forward pass: one stream cut into segments, or right-padded rows with a mask."""


@dataclass(frozen=True)
class Segments:
    """The cut of one stream. Lives on the host: kernels are launched from its numbers without asking the device.

    Example: prompt P P P with completions A A and B, then an unrelated row C C

        stream        P P P A A B C C
        lengths       (3, 2, 1, 2)
        parents       (-1, 0, 0, -1)
        position_ids  0 1 2 3 4 3 0 1
        predecessors  - 0 1 2 3 2 - 6
    """

    lengths: tuple[int, ...]
    """Tokens of each segment, in the order of the stream; all positive."""
    parents: tuple[int, ...]
    """Index of the segment whose tokens come before this one's, or -1. A parent stands before its children."""

    def __post_init__(self):
        if len(self.lengths) != len(self.parents):
            raise ValueError(
                f"{len(self.lengths)} segment lengths but {len(self.parents)} parents: give each segment one, or -1"
            )
        for i, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            if length < 1:
                raise ValueError(f"segment {i} has {length} tokens: a stream has no place for empty ones. Drop them")
            if not -1 <= parent < i:
                raise ValueError(
                    f"segment {i} names segment {parent} as its parent: a parent must stand before its children"
                )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index in the stream of each segment's first token."""
        starts, total = [], 0
        for length in self.lengths:
            starts.append(total)
            total += length
        return tuple(starts)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Tokens that come before each segment in its own branch."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + self.lengths[parent])
        return tuple(depths)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def is_flat(self) -> bool:
        """No segment continues another."""
        return max(self.parents, default=-1) < 0

    def ancestors(self, segment: int) -> tuple[int, ...]:
        """The segments that come before `segment` in its branch, the root first."""
        chain = []
        while (segment := self.parents[segment]) >= 0:
            chain.append(segment)
        return tuple(reversed(chain))

    def span(self, segment: int) -> slice:
        """Where `segment` stands in the stream."""
        return slice(self.starts[segment], self.starts[segment] + self.lengths[segment])

    def position_ids(self) -> Tensor:
        """(1, N): each token's distance from the root of its branch."""
        steps = zip(self.depths, self.lengths, strict=True)
        return torch.cat([torch.arange(depth, depth + length) for depth, length in steps])[None]

    def predecessors(self) -> Tensor:
        """(N,): index in the stream of the token before each token in its branch; -1 where there is none."""
        before = torch.arange(-1, self.num_tokens - 1)
        for start, parent in zip(self.starts, self.parents, strict=True):
            before[start] = -1 if parent < 0 else self.starts[parent] + self.lengths[parent] - 1
        return before
