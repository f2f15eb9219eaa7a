"""Which rows are asked next: epoch after epoch, each in its own order, resumable at any row."""

from collections.abc import Iterator
from typing import Any

import torch

from strop.data.formats import Row

BUFFER = 1000
"""Rows of a stream among which the next one is drawn."""


class PromptSource:
    """The rows of a data set or of a stream, again and again.

    With `shuffle` every epoch has an order of its own that follows from `seed`, of a data set the one that TRL's
    sampler has. What it returns next is told by two numbers, `epoch` and `position`.
    """

    def __init__(self, rows: Any, shuffle: bool = True, seed: int = 0):
        self.rows, self.shuffle, self.seed = rows, shuffle, seed
        self.is_stream = not hasattr(rows, "__len__")
        self.go_to(0, 0)

    def go_to(self, epoch: int, position: int) -> None:
        """The next row is the one after `position` rows of epoch number `epoch`."""
        self.epoch, self.position = epoch, position
        self._order: list[int] | None = None
        self._stream: Iterator[Row] | None = None

    def take(self, count: int, across: bool = False) -> list[Row]:
        """The next `count` rows, fewer where the epoch ends; `across` goes on with the next epoch's.

        Raises ValueError for a source without any row.
        """
        found: list[Row] = []
        empty = 0
        while len(found) < count and (not found or across):
            part = self._of_epoch(count - len(found))
            found += part
            empty = 0 if part else empty + 1
            if empty > 1:
                raise ValueError("the train data set has no rows to ask the model for completions of")
        return found

    def _of_epoch(self, count: int) -> list[Row]:
        """Rows of this epoch; the epoch is over when they are fewer, or when none is left after them."""
        part = self._streamed(count) if self.is_stream else self._indexed(count)
        self.position += len(part)
        if len(part) < count or (not self.is_stream and self.position == len(self.rows)):
            self.go_to(self.epoch + 1, 0)
        return part

    def _indexed(self, count: int) -> list[Row]:
        if self._order is None:
            self._order = self._ordered()
        return [self.rows[i] for i in self._order[self.position : self.position + count]]

    def _ordered(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.rows)))
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epoch):
            torch.randperm(len(self.rows), generator=generator)
        return torch.randperm(len(self.rows), generator=generator).tolist()

    def _streamed(self, count: int) -> list[Row]:
        if self._stream is None:
            self._stream = self._opened()
        return [row for _, row in zip(range(count), self._stream, strict=False)]

    def _opened(self) -> Iterator[Row]:
        rows = self.rows
        if self.shuffle and hasattr(rows, "shuffle"):
            rows = rows.shuffle(seed=self.seed, buffer_size=BUFFER)
        if hasattr(rows, "set_epoch"):
            rows.set_epoch(self.epoch)
        stream = iter(rows)
        for _ in range(self.position):
            next(stream, None)
        return stream
