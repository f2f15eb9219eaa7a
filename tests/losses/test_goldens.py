"""The same numbers as TRL where TRL is right. `tests/goldens/*_losses.json` say how they were made."""

import json
from pathlib import Path

import pytest
import torch

from strop.losses.preference import F_DIVERGENCES, PREFERENCE_LOSSES, Pairs, ld_sum, wpo_weight
from strop.losses.reference_free import PER_TOKEN_MEAN, REFERENCE_FREE_LOSSES, alphapo_pairs, odds_margin
from strop.losses.reward import bradley_terry, centring
from strop.losses.unpaired import UNPAIRED_LOSSES, kto_baseline, running_mean, weighted

GOLDENS = Path(__file__).parents[1] / "goldens"
PREFERENCE, UNPAIRED, REWARD = (
    json.loads((GOLDENS / f"{name}_losses.json").read_text()) for name in ("preference", "unpaired", "reward")
)
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def by_name(cases):
    return [pytest.param(case, id=case["name"]) for case in cases]


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def preference_losses(logps: torch.Tensor, options: dict) -> torch.Tensor:
    """Loss of each pair from per-token log-probabilities, chosen rows first."""
    name, mask = options["loss_type"], torch.tensor(PREFERENCE["mask"])
    lengths = torch.stack(mask.sum(-1).chunk(2))
    keep = lengths.amin(0).repeat(2)
    sums = ld_sum(logps, mask, keep, options.get("ld_alpha", 1.0))
    reference = ld_sum(logps.new_tensor(PREFERENCE["reference_logps"]), mask, keep, options.get("ld_alpha", 1.0))
    score = F_DIVERGENCES[options.get("f_divergence_type", "reverse_kl")]
    alpha = {"alpha": options["f_alpha_divergence_coef"]} if "f_alpha_divergence_coef" in options else {}
    chosen, rejected = score(sums - reference, **alpha).chunk(2)
    chosen_reference, rejected_reference = reference.chunk(2)
    own = {}
    # TRL's sigmoid takes label smoothing and ignores it.
    if "label_smoothing" in options and name != "sigmoid":
        own["smoothing"] = options["label_smoothing"]
    if "discopop_tau" in options:
        own["tau"] = options["discopop_tau"]
    pairs = Pairs(chosen, rejected, *lengths, reference_margin=chosen_reference - rejected_reference)
    losses = PREFERENCE_LOSSES[name](pairs, options["beta"], **own)
    if options.get("use_weighting"):
        weight_chosen, weight_rejected = wpo_weight(logps, logps.new_tensor(PREFERENCE["log_collision"]), mask).chunk(2)
        losses = losses * weight_chosen * weight_rejected
    return losses


@pytest.mark.parametrize("case", by_name(PREFERENCE["cases"]))
def test_preference(case):
    logps = torch.tensor(PREFERENCE["logps"], dtype=getattr(torch, case["dtype"]), requires_grad=True)
    losses = preference_losses(logps, case["args"])
    losses.mean().backward()
    # TRL holds exo_pair's smoothing in float32 whatever the loss; its alpha divergence knows no float64.
    close = EXACT
    if case["args"]["loss_type"] == "exo_pair":
        close = {"rtol": 1e-7, "atol": 1e-7}
    elif case["dtype"] == "float32":
        close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(losses.mean(), logps.new_tensor(case["loss"]), **close)
    torch.testing.assert_close(logps.grad, logps.new_tensor(case["gradient"]), **close)
    if case["losses"]:
        torch.testing.assert_close(losses, logps.new_tensor(case["losses"]), **close)


@pytest.mark.parametrize("case", by_name(UNPAIRED["kto_cases"]))
def test_kto(case):
    rows, options = {key: doubles(value) for key, value in UNPAIRED["kto"].items()}, case["args"]
    mismatched = rows["mismatched_logps"] - rows["mismatched_reference_logps"]
    baseline = kto_baseline(-mismatched.sum() if options.get("swap_kl") else mismatched.sum(), len(mismatched))
    logps, labels = rows["logps"].requires_grad_(), torch.tensor(options["label"])
    losses = UNPAIRED_LOSSES[options["loss_type"]](logps - rows["reference_logps"], labels, baseline, options["beta"])
    loss = weighted(losses, labels, options.get("dw", 1.0), options.get("uw", 1.0)).mean()
    loss.backward()
    torch.testing.assert_close(loss, doubles(case["loss"]), **EXACT)
    torch.testing.assert_close(logps.grad, doubles(case["gradient"]), **EXACT)
    if options["loss_type"] == "kto":
        torch.testing.assert_close(baseline, doubles(case["kl"]), **EXACT)


def test_bco():
    beta, mean, count = UNPAIRED["bco_beta"], 0.0, 0
    for step in UNPAIRED["bco_steps"]:
        policy = doubles(step["policy_chosen_logps"] + step["policy_rejected_logps"])
        log_ratio = policy - doubles(step["ref_chosen_logps"] + step["ref_rejected_logps"])
        labels = torch.arange(len(policy)) < len(step["policy_chosen_logps"])
        mean = running_mean(mean, count, log_ratio.sum().item(), len(log_ratio))
        count += len(log_ratio)
        losses = UNPAIRED_LOSSES["bco"](log_ratio, labels, doubles(mean), beta)
        # TRL keeps its running mean, a mean of rewards, in float32.
        assert beta * mean == pytest.approx(step["delta"], abs=1e-7)
        torch.testing.assert_close(losses, doubles(step["losses"]), rtol=0, atol=1e-7)


def reference_free(case, data, beta):
    """(B,) losses and (): the mean with the likelihood of the chosen completion."""
    name, options = case["args"]["loss_type"], case["args"]
    own = {new: options[old] for old, new in {"ls": "smoothing", "gamma": "gamma"}.items() if old in options}
    pairs = Pairs(*(doubles(data[key]) for key in ("chosen", "rejected", "chosen_length", "rejected_length")))
    if "alpha" in options and data is REWARD["pairs"]["cpo"]:
        pairs = alphapo_pairs(pairs, options["alpha"], name in PER_TOKEN_MEAN)
    losses = REFERENCE_FREE_LOSSES[name](pairs, options.get("beta", beta), **own)
    share = options.get("cpo_alpha", 1.0) if data is REWARD["pairs"]["cpo"] else options.get("alpha", 1.0)
    return losses, losses.mean() + share * data["nll"]


@pytest.mark.parametrize("case", by_name(REWARD["cpo_cases"]))
def test_cpo_and_simpo(case):
    losses, loss = reference_free(case, REWARD["pairs"]["cpo"], 0.1)
    torch.testing.assert_close(losses, doubles(case["losses"]), **EXACT)
    torch.testing.assert_close(loss, doubles(case["loss"]), **EXACT)


@pytest.mark.parametrize("case", by_name(REWARD["tpo_cases"]))
def test_tpo(case):
    _, loss = reference_free(case, REWARD["pairs"]["tpo"], 0.01)
    torch.testing.assert_close(loss, doubles(case["loss"]), **EXACT)


@pytest.mark.parametrize("case", by_name(REWARD["orpo_cases"]))
def test_orpo(case):
    data = REWARD["pairs"]["cpo"]
    pairs = Pairs(*(doubles(data[key]) for key in ("chosen", "rejected", "chosen_length", "rejected_length")))
    # TRL computes odds in float32.
    losses = REFERENCE_FREE_LOSSES["orpo"](pairs, case["args"]["beta"])
    torch.testing.assert_close(-losses, doubles(case["negated"]), rtol=1e-6, atol=1e-7)
    assert odds_margin(pairs).mean().item() == pytest.approx(case["log_odds"], rel=1e-6)


@pytest.mark.parametrize("case", REWARD["reward_cases"], ids=lambda case: "_".join(case["args"]) or "plain")
def test_reward(case):
    scores = doubles(REWARD["reward"]["scores"]).requires_grad_()
    margin = doubles(case["args"]["margin"]) if "margin" in case["args"] else 0.0
    losses = bradley_terry(*scores.chunk(2), margin) + case["args"].get("center", 0.0) * centring(*scores.chunk(2))
    losses.mean().backward()
    torch.testing.assert_close(losses.mean(), doubles(case["loss"]), **EXACT)
    torch.testing.assert_close(scores.grad, doubles(case["gradient"]), **EXACT)
