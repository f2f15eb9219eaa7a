"""However a step is cut, losses that need all its rows have the value and the gradient of the step as a whole."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from strop.trainer import whole_step


@dataclass(frozen=True)
class Scores:
    value: Tensor
    other: Tensor
    scale: float = 2.0


def ranked(scores: Scores) -> Tensor:
    """Quantile against quantile: every loss depends on all rows. (n,) at the place of the row's value."""
    sorted_values, order = scores.value.sort()
    return (scores.scale * (sorted_values - scores.other.sort().values)).exp()[order.argsort()]


def of(rows: Tensor) -> Scores:
    return Scores(rows[:, 0], rows[:, 1])


def rows(n: int = 7) -> Tensor:
    return torch.randn(n, 2, dtype=torch.float64, requires_grad=True)


def run_rank(parts: list[Tensor], monkeypatch, others=None, index=0) -> Tensor:
    """The sum of the shares of one rank's micro-batches; `others` are what the ranks around it have collected."""
    if others is not None:
        monkeypatch.setattr(whole_step, "gather_object", lambda mine: [*others[:index], mine[0], *others[index:]])
    batches = [{"rows": part} for part in parts]

    def run(batch):
        return whole_step.total(ranked, of(batch["rows"]), batch)

    with torch.no_grad():
        whole_step.look_ahead(batches, run, 1 if others is None else 1 + len(others), index)
    return sum(run(batch) for batch in batches)


def test_micro_batches_add_up_to_the_step(monkeypatch):
    leaf = rows()
    expected = whole_step.total(ranked, of(leaf), {})
    (gradient,) = torch.autograd.grad(expected, leaf)
    share = run_rank([leaf[:3], leaf[3:3], leaf[3:4], leaf[4:]], monkeypatch)
    torch.testing.assert_close(share, expected)
    torch.testing.assert_close(torch.autograd.grad(share, leaf)[0], gradient)


def test_ranks_add_up_to_the_step(monkeypatch):
    """Two ranks with unequal micro-batches, one of them empty."""
    leaf = rows()
    expected = whole_step.total(ranked, of(leaf), {})
    (gradient,) = torch.autograd.grad(expected, leaf)
    cuts = [[leaf[:2], leaf[2:5]], [leaf[5:], leaf[:0]]]
    collected = [[of(part.detach()) for part in parts] for parts in cuts]
    shares = [run_rank(cuts[0], monkeypatch, [collected[1]], 0), run_rank(cuts[1], monkeypatch, [collected[0]], 1)]
    torch.testing.assert_close(sum(shares), expected)
    torch.testing.assert_close(sum(torch.autograd.grad(share, leaf)[0] for share in shares), gradient)


def test_collected_scores_have_no_graph_and_keep_what_is_no_tensor():
    collected: whole_step.Collected = whole_step.Collected()
    assert collected.gathered(1) == (None, 0)
    for part in rows().split(3):
        assert whole_step.total(ranked, of(part), {whole_step.KEY: collected}) == 0
    everything, first = collected.gathered(1)
    assert (first, whole_step.num_rows(everything), everything.scale) == (0, 7, 2.0)
    assert not everything.value.requires_grad


@pytest.mark.parametrize("far", [float("inf"), float("nan")])
def test_others_that_are_not_finite_show(far, monkeypatch):
    leaf = rows(4)
    spoilt = leaf.detach().clone()
    spoilt[3] = far
    share = run_rank([leaf[:2], spoilt[2:]], monkeypatch)
    assert not share.isfinite()
