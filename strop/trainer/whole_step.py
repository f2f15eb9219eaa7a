"""Losses that must see all rows of an optimizer step: quantiles (AOT), an estimate of the KL (KTO), a mean (BCO).

A step is cut into micro-batches and ranks, and only one micro-batch a rank has a graph at a time:

    rank 0   [a b] [c d]     look ahead:   scores of a b c d e f g h, without a graph, on every rank
    rank 1   [e f] [g h]     train [c d]:  losses of a b C D e f g h, of which C and D are live

`total` then has the value of the losses of c and d, and the gradient of all eight losses in C and D. Added up over
micro-batches and ranks, both are those of the step computed at once.

Scores are a dataclass whose tensors, (n,) each, have one entry a row; what isn't a tensor is the same for all rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import torch
from accelerate.utils import gather_object
from torch import Tensor

from strop.data.collate import Batch

KEY = "whole_step"
"""Where a batch holds what it knows of the rows of others: a `WholeStep`, or `Collected` while they are gathered."""

Scores = TypeVar("Scores")


@dataclass(frozen=True)
class WholeStep(Generic[Scores]):
    """The scores of all rows of a step, and which of them are a micro-batch's own."""

    scores: Scores
    own: slice

    def with_live(self, live: Scores) -> Scores:
        """The scores of all rows, the micro-batch's own ones with their graph."""
        before, after = slice(0, self.own.start), slice(self.own.stop, None)
        return _by_tensor(
            lambda live, all: torch.cat([all[before].to(live), live, all[after].to(live)]), live, self.scores
        )


@dataclass
class Collected(Generic[Scores]):
    """Scores of batches, without a graph, until there are all of them."""

    scores: list[Scores] = field(default_factory=list)

    def add(self, scores: Scores) -> None:
        self.scores.append(_by_tensor(lambda tensor: tensor.detach().cpu(), scores))

    def gathered(self, num_processes: int, process_index: int = 0) -> tuple[Scores | None, int]:
        """All scores of all ranks, None if there is not one batch, and the index of this rank's first row.

        Every rank must call it, and gets the same scores.
        """
        ranks = gather_object([self.scores]) if num_processes > 1 else [self.scores]
        first = sum(num_rows(scores) for rank in ranks[:process_index] for scores in rank)
        every = [scores for rank in ranks for scores in rank]
        return (_by_tensor(lambda *parts: torch.cat(parts), *every) if every else None), first


def look_ahead(batches: list[Batch], run: Callable[[Batch], Any], num_processes: int, process_index: int) -> None:
    """Give each micro-batch of a step the scores of the whole step; `run` must get to `total` without a graph."""
    collected: Collected = Collected()
    for batch in batches:
        batch[KEY] = collected
        run(batch)
    everything, first = collected.gathered(num_processes, process_index)
    for batch, scores in zip(batches, collected.scores, strict=True):
        own = slice(first, first + num_rows(scores))
        batch[KEY], first = WholeStep(everything, own), own.stop


def total(row_losses: Callable[[Scores], Tensor], scores: Scores, batch: Batch) -> Tensor:
    """The sum of the losses of this batch's rows, (), with the gradient of the losses of all rows of its step.

    `row_losses` gives the losses (n,) of all rows it is given, `scores` are those of this batch's rows. 0 while scores
    are collected.
    """
    others = batch.get(KEY)
    if others is None:
        return row_losses(scores).sum()
    if isinstance(others, Collected):
        others.add(scores)
        return torch.zeros(())
    losses = row_losses(others.with_live(scores))
    own = losses[others.own].sum()
    rest = losses[: others.own.start].sum() + losses[others.own.stop :].sum()
    return own + (rest - rest.detach())


def num_rows(scores: Any) -> int:
    """n of the scores' tensors."""
    values = (getattr(scores, f.name) for f in fields(scores))
    return next(len(value) for value in values if isinstance(value, Tensor))


def _by_tensor(function: Callable[..., Tensor], *scores: Scores) -> Scores:
    """Scores whose tensors are `function` of those of the given ones."""
    names = [f.name for f in fields(scores[0]) if isinstance(getattr(scores[0], f.name), Tensor)]
    return replace(scores[0], **{name: function(*(getattr(one, name) for one in scores)) for name in names})
