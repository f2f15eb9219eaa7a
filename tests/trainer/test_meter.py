"""Weighted means, and their survival of a restart."""

from types import SimpleNamespace

import pytest
import torch

from strop.trainer.meter import RunMeter, WeightedSums, means


def test_a_mean_weighs_by_what_was_measured():
    sums = WeightedSums()
    sums.add({"entropy": (torch.tensor(6.0), torch.tensor(2))})
    sums.add({"entropy": (1.0, 8.0), "kl": (3.0, 1.0)})
    assert means(sums.totals(num_processes=1)) == {"entropy": pytest.approx(7 / 10), "kl": 3.0}


def test_what_was_not_measured_is_absent():
    sums = WeightedSums()
    sums.add({"aux_loss": (torch.tensor(0.0), torch.tensor(0))})
    assert means(sums.totals(1)) == {}


def test_of_extremes_the_outermost_is_kept(monkeypatch):
    sums = WeightedSums()
    for low, high in ((2.0, 3.0), (-1.0, 2.5), (0.5, 4.0)):
        sums.add({"min_reward": (torch.tensor(low), 1), "completions/max_length": (high, 1.0)})
    assert means(sums.totals(1)) == {"min_reward": -1.0, "completions/max_length": 4.0}
    other = {"min_reward": [-2.0, 1.0], "mean_reward": [6.0, 3.0]}
    monkeypatch.setattr("strop.trainer.meter.gather_object", lambda mine: [*mine, other])
    assert means(sums.totals(2)) == {"min_reward": -2.0, "completions/max_length": 4.0, "mean_reward": 2.0}


def test_small_additions_to_a_large_sum_are_kept():
    sums = WeightedSums()
    sums.add({"n": (torch.tensor(2.0**24), 1.0)})
    for _ in range(8):
        sums.add({"n": (torch.tensor(1.0), 0.0)})  # in float32 each of them would vanish
    assert means(sums.totals(1))["n"] == 2**24 + 8


def test_a_restart_in_the_middle_of_a_window_changes_nothing():
    def measure(meter, steps):
        for step in steps:
            meter.num_tokens += 10
            meter.window.add({"loss": (torch.tensor(0.1 * step), 1.0)})

    whole, before, after = RunMeter(), RunMeter(), RunMeter()
    measure(whole, range(1, 6))
    measure(before, range(1, 4))
    state = SimpleNamespace(stateful_callbacks={"RunMeter": before.state()}, is_world_process_zero=True, global_step=3)
    after.on_train_begin(None, state, None)
    measure(after, range(4, 6))
    assert after.drain(1) == whole.drain(1)
    assert (after.num_tokens, after.loss_sum) == (whole.num_tokens, whole.loss_sum)


def test_a_weight_goes_where_its_sum_is():
    sums = WeightedSums()
    for _ in range(2):
        sums.add({"x": (torch.zeros((), device="meta"), 3)})
    assert sums.sums["x"].device.type == "meta"
