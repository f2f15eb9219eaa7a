"""Losses of pairs that the policy writes: TRL's numbers, and what a label that isn't certain means."""

import json
from pathlib import Path

import pytest
import torch

from strop.losses.online import exploration, labelled, nash_md
from strop.losses.preference import PREFERENCE_LOSSES, Pairs

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "online_losses.json").read_text())["nashmd_xpo"]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def pairs_of(first, second):
    return Pairs(first, second, torch.ones_like(first), torch.ones_like(second))


def cases(algo):
    return [case for case in GOLDENS["cases"] if case["algo"] == algo]


@pytest.mark.parametrize("case", cases("nash_md"), ids=lambda case: f"beta {case['beta']}")
def test_nash_md_has_the_numbers_of_trl(case):
    policy = doubles(GOLDENS["model_logps_model"]).requires_grad_()
    reference, chance = doubles(GOLDENS["ref_logps_model"]), doubles(GOLDENS["probability"])
    loss = nash_md(policy, reference, torch.ones_like(policy), chance, case["beta"]).mean()
    loss.backward()
    torch.testing.assert_close(loss, doubles(case["loss"]), **EXACT)
    torch.testing.assert_close(policy.grad, doubles(case["grad"]), **EXACT)


@pytest.mark.parametrize("case", cases("xpo"), ids=lambda case: f"{case['loss_type']} beta {case['beta']}")
def test_xpo_has_the_numbers_of_trl(case):
    first, second = (doubles(GOLDENS[f"model_logps_{who}"]).requires_grad_() for who in ("model", "ref"))
    ratios = [
        x.sum(-1) - doubles(GOLDENS[f"ref_logps_{who}"]).sum(-1) for x, who in ((first, "model"), (second, "ref"))
    ]
    preference = labelled(
        PREFERENCE_LOSSES[case["loss_type"]], pairs_of(*ratios), case["beta"], doubles(GOLDENS["chosen_mask"])
    )
    bonus = exploration(second.sum(-1), case["alpha"])
    torch.testing.assert_close(preference, doubles(case["dpo"]), **EXACT)
    torch.testing.assert_close(bonus, doubles(case["xpo"]), **EXACT)
    (preference + bonus).mean().backward()
    torch.testing.assert_close(first.grad, doubles(case["grad_model_data"]), **EXACT)
    torch.testing.assert_close(second.grad, doubles(case["grad_ref_data"]), **EXACT)


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES.keys() - {"aot", "aot_unpaired", "robust"}))
def test_a_label_of_one_is_the_loss_itself_and_orders_are_alike(name):
    torch.manual_seed(0)
    first, second, label = torch.randn(5, dtype=torch.float64), torch.randn(5).double(), torch.rand(5).double()
    loss = PREFERENCE_LOSSES[name]
    certain = labelled(loss, pairs_of(first, second), 0.3, torch.ones_like(label))
    torch.testing.assert_close(certain, loss(pairs_of(first, second), 0.3))
    one, other = (
        labelled(loss, pairs, 0.3, chance)
        for pairs, chance in ((pairs_of(first, second), label), (pairs_of(second, first), 1 - label))
    )
    torch.testing.assert_close(one, other)


def test_under_a_label_p_the_best_margin_is_its_log_odds():
    """beta h = log p / (1 - p): the DPO policy whose preferences are the labels."""
    label, beta = doubles([0.2, 0.5, 0.9]), 0.25
    margin = (torch.logit(label) / beta).requires_grad_()
    labelled(PREFERENCE_LOSSES["sigmoid"], pairs_of(margin, torch.zeros_like(margin)), beta, label).sum().backward()
    torch.testing.assert_close(margin.grad, torch.zeros_like(margin), **EXACT)


def test_nash_md_rests_where_the_chance_pays_for_the_divergence():
    """A token's gradient is 0 where beta log pi/ref = chance - 1/2, and what is masked has none."""
    reference, mask = torch.zeros(1, 3).double(), doubles([[1, 1, 0]])
    policy = doubles([[0.8, 0.2, 5.0]]).requires_grad_()
    nash_md(policy, reference, mask, doubles([0.9]), beta=0.5).sum().backward()
    torch.testing.assert_close(policy.grad, doubles([[0.5 * 0.8 - 0.4, 0.5 * 0.2 - 0.4, 0.0]]), **EXACT)
