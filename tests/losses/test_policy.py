"""Policy losses: numbers by hand, TRL's numbers, and laws of every row of the table."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from strop.losses.corrections import entropy_threshold, importance_correction, off_policy_keep, top_entropy_keep
from strop.losses.penalties import kl_penalty
from strop.losses.policy import (
    AGAINST_REFERENCE,
    ANY_LEVEL,
    POLICY_LOSSES,
    RATIOS,
    PolicyLoss,
    Sampled,
    policy_loss,
    token_ratio,
)
from strop.losses.reduce import StepCounts, sequence_sum, token_mean

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "policy_losses.json").read_text())
NEEDED = {"dr_grpo": {"max_completion_length": 8}}
"""Options without a default."""


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def one_row(*log_ratios: float, advantage: float = 1.0, mask=None) -> Sampled:
    """A row sampled at log-probabilities of -1, which has since moved by `log_ratios`."""
    logps = (doubles([log_ratios]) - 1).requires_grad_()
    mask = torch.ones(1, len(log_ratios)) if mask is None else torch.tensor([mask])
    return Sampled(logps, torch.full_like(logps, -1.0), doubles([[advantage]]), mask)


def counts_of(mask: torch.Tensor) -> StepCounts:
    return StepCounts(int(mask.sum()), int(mask.any(-1).sum()))


def value_and_gradient(name: str, sampled: Sampled, counts: StepCounts | None = None, penalty=None, **options):
    sampled = replace(sampled, logps=sampled.logps.detach().requires_grad_())
    loss = POLICY_LOSSES[name](sampled, counts or counts_of(sampled.mask), penalty, **NEEDED.get(name, {}) | options)
    assert loss.shape == ()
    return loss.detach(), torch.autograd.grad(loss, sampled.logps)[0]


# By hand


def test_a_ratio_beyond_the_clip_has_no_gradient():
    #  ratios 1.5 and 0.5, advantage 1: the first counts as 1.2, the second as it is, with gradient -0.5 / 2
    loss, gradient = value_and_gradient("dapo", one_row(doubles(1.5).log().item(), doubles(0.5).log().item()))
    torch.testing.assert_close(loss, doubles(-(1.2 + 0.5) / 2))
    torch.testing.assert_close(gradient, doubles([[0.0, -0.25]]))


def test_delta_bounds_negative_advantages_too():
    #  ratio 10 at advantage -1: 10 without a bound, 4 with one
    moved = one_row(doubles(10.0).log().item(), advantage=-1.0)
    assert value_and_gradient("grpo", moved)[0].item() == pytest.approx(10.0)
    loss, gradient = value_and_gradient("grpo", moved, delta=4.0)
    assert (loss.item(), gradient.item()) == (4.0, 0.0)


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, -1.2), (-1.0, 1.262802)])
def test_the_ratio_of_a_sequence_knows_no_padding(advantage, expected):
    #  exp((0.3 - 0.1 + 0.5) / 3) = 1.262802, clipped to 1.2 where that is worse
    moved = one_row(0.3, -0.1, 0.5, 9.0, advantage=advantage, mask=[1, 1, 1, 0])
    loss, gradient = value_and_gradient("gspo", moved, epsilon=0.2, epsilon_high=0.2)
    assert loss.item() == pytest.approx(expected, abs=5e-7)
    assert gradient[0, 3] == 0


def test_long_products_are_finite():
    #  0.7^300 and 0.7^-300
    for step in (0.7, 1 / 0.7):
        moved = one_row(*[doubles(step).log().item()] * 300, advantage=-1.0)
        for name in POLICY_LOSSES:
            assert all(x.isfinite().all() for x in value_and_gradient(name, moved))


def test_masked_truncated_completions_leave_the_denominator():
    #  a row of 4 tokens that ended, advantage 1; a row of 8 that was cut, advantage -1, masked: -4/4 and not -4/12
    logps = torch.full((2, 8), -1.0)
    mask = torch.tensor([[1] * 4 + [0] * 4, [0] * 8])
    loss, _ = value_and_gradient("dapo", Sampled(logps, logps, torch.tensor([[1.0], [-1.0]]), mask))
    assert loss.item() == -1.0
    loss, gradient = value_and_gradient("dapo", Sampled(logps, logps, torch.ones(2, 1), torch.zeros(2, 8)))
    assert (loss.item(), gradient.abs().max().item()) == (0.0, 0.0)


def test_weights_of_vespo():
    #  w = e^0.5 from two tokens; k 2 and lambda 3 at a positive advantage: w^2 exp(3 (1 - w)) = 0.38821 on each token
    loss, gradient = value_and_gradient("vespo", one_row(0.2, 0.3))
    weight = (doubles(1.0) + 3 * (1 - doubles(0.5).exp())).exp()
    torch.testing.assert_close(gradient, -weight.expand(1, 2) / 2)
    torch.testing.assert_close(loss, -weight * (-0.8 - 0.7) / 2)
    #  the sampler's e^0.1 is part of w, as a weight of tokens or of the whole
    corrected = replace(one_row(0.2, 0.3), correction=doubles([[0.04, 0.06]]).exp())
    expected = (2 * doubles(0.6) + 3 * (1 - doubles(0.6).exp())).exp()
    torch.testing.assert_close(value_and_gradient("vespo", corrected)[1], -expected.expand(1, 2) / 2)
    whole = replace(corrected, correction=doubles([[0.1]]).exp())
    torch.testing.assert_close(value_and_gradient("vespo", whole)[1], -expected.expand(1, 2) / 2)


def test_stopped_gradients_by_hand():
    #  cispo: the capped ratio is a constant. gspo_token: the row's ratio e^0.2 is.
    _, gradient = value_and_gradient("cispo", one_row(0.3, 2.0))
    torch.testing.assert_close(gradient, -torch.stack([doubles(0.3).exp(), doubles(5.0)])[None] / 2)
    advantages = doubles([[1.0, 3.0]])
    _, gradient = value_and_gradient("gspo_token", replace(one_row(0.1, 0.3), advantages=advantages), epsilon_high=1.0)
    torch.testing.assert_close(gradient, -doubles(0.2).exp() * advantages / 2)


def test_regression_to_the_advantage():
    #  (0.5 * (0.2 + 0.6) - 1)^2 = 0.36, gradient 2 * -0.6 * 0.5
    loss, gradient = value_and_gradient("a2po", one_row(0.2, 0.6), beta2=0.5)
    assert loss.item() == pytest.approx(0.36)
    torch.testing.assert_close(gradient, doubles([[-0.6, -0.6]]))


def test_options_are_refused_where_there_are_none():
    with pytest.raises(ValueError, match=r"\['delta'\] are no options of this loss, whose own are .*epsilon_high"):
        value_and_gradient("cispo", one_row(0.0), delta=2.0)
    with pytest.raises(ValueError, match=r"epsilon_high=0\.2 caps the ratios of cispo below 1"):
        value_and_gradient("cispo", one_row(0.0), epsilon_high=0.2)
    with pytest.raises(ValueError, match="loss_type='gropo' is no policy loss"):
        policy_loss("gropo")
    with pytest.raises(ValueError, match="importance_sampling_level='row' is no level"):
        policy_loss("grpo", "row")
    with pytest.raises(ValueError, match="would be ignored: vespo is defined by its own ratio"):
        policy_loss("vespo", "sequence")
    assert policy_loss("luspo").ratio is RATIOS["sequence"]
    assert policy_loss("gspo", "sequence") == POLICY_LOSSES["gspo"]
    assert POLICY_LOSSES["dapo"].options == {"epsilon": 0.2, "epsilon_high": None, "delta": None}


def test_a_loss_of_ones_own():
    def plain(sampled, log_ratio, scale=1.0):
        return -scale * sampled.advantages * sampled.logps

    reinforce = PolicyLoss(token_ratio, plain, token_mean)
    assert reinforce(one_row(0.0, 0.0), StepCounts(2, 1), scale=3.0).item() == 3.0
    assert reinforce.clipped(one_row(0.0, 0.0)) is None


# TRL's numbers


def golden_loss(args: dict):
    """The row, what it reads, the counts of TRL, a penalty and options."""
    inputs = {key: doubles(value) for key, value in GOLDENS["inputs"].items()}
    logps, mask = inputs["per_token_logps"].requires_grad_(), inputs[args.get("mask", "mask")]
    if args.get("use_tool_mask"):
        mask = mask * inputs["tool_mask"]
    old = logps.detach() if args.get("old") == "none" else inputs["old_per_token_logps"]
    advantages = doubles(args["advantages"]) if "advantages" in args else inputs["advantages"][:, None]
    level = "token" if args["loss_type"] in ANY_LEVEL else None
    loss = policy_loss(args["loss_type"], args.get("importance_sampling_level", level))
    keep = correction = penalty = None
    if "off_policy_mask_threshold" in args:
        sampler = inputs["sampling_per_token_logps"] if args.get("sampling_logps_in_inputs") else old
        keep = off_policy_keep(logps, sampler, advantages, mask, args["off_policy_mask_threshold"])
    if args.get("top_entropy_quantile", 1.0) < 1:
        threshold = entropy_threshold(inputs["entropies"], mask, args["top_entropy_quantile"])
        keep = top_entropy_keep(inputs["entropies"], mask, threshold)
    if "correction" in args:
        correction = importance_correction(
            old, inputs["sampling_per_token_logps"], mask, args["correction"], clip_min=0.8, clip_max=1.3
        )
    sampled = Sampled(logps, old, advantages, mask, keep, correction)
    if "beta" in args:
        factor = loss.log_ratio(sampled) if args.get("use_bias_correction_kl", True) else None
        penalty = args["beta"] * kl_penalty(logps, inputs["ref_per_token_logps"], mask, "k3", factor)
    options = {key: value for key, value in args.items() if key in loss.options} | NEEDED.get(args["loss_type"], {})
    # TRL counts rows without a trained token as rows.
    return loss, sampled, StepCounts(int(mask.sum()), len(mask)), penalty, options


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in GOLDENS["cases"]])
def test_the_numbers_of_trl(case):
    args = case["args"]
    loss, sampled, counts, penalty, options = golden_loss(args)
    value = loss(sampled, counts, penalty, **options)
    value.backward()
    # TRL keeps the temperatures of sapo in float32.
    close = {"rtol": 0, "atol": 2e-7 if args["loss_type"] == "sapo" else 1e-10}
    expected = case["loss"]
    if args["loss_type"] in ("rloo", "gmpo"):
        # In TRL a row without a token to train has ratio 1, and so a constant without a gradient.
        empty = sampled.kept.sum(-1) == 0
        expected += (sampled.advantages[empty].sum() / len(empty)).item()
    torch.testing.assert_close(value, doubles(expected), **close)
    torch.testing.assert_close(sampled.logps.grad, doubles(case["gradient"]), **close)


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in GOLDENS["cases"] if "clipped" in c])
def test_what_is_clipped(case):
    loss, sampled, _, _, options = golden_loss(case["args"])
    clipped = loss.clipped(sampled, **{key: value for key, value in options.items() if key in loss.options})
    if clipped is None:
        assert case["args"]["loss_type"] in ("sapo", "vespo")
        return
    # Shares of tokens, or of rows where a row has one ratio; those without a token count in TRL.
    total = sampled.mask.sum() if clipped[0].shape == sampled.mask.shape else len(sampled.mask)
    torch.testing.assert_close(
        torch.stack([side.sum() / total for side in clipped]).double(), doubles(case["clipped"]), rtol=0, atol=1e-6
    )


# Laws


@pytest.fixture
def sampled() -> Sampled:
    """Six rows of up to seven tokens with a hole in the mask, off-policy, one token clipped here and there."""
    torch.manual_seed(0)
    old = -3 * torch.rand(6, 7, dtype=torch.float64) - 0.3
    lengths = torch.tensor([7, 5, 1, 6, 4, 7])[:, None]
    mask = (torch.arange(7) < lengths).double()
    mask[0, 2:4] = 0
    advantages = torch.tensor([1.3, -0.7, 0.4, -1.1, 0.9, -0.8], dtype=torch.float64)[:, None]
    keep = (torch.rand(6, 7) < 0.7).double() * mask
    correction = 0.5 + torch.rand(6, 7, dtype=torch.float64)
    return Sampled(old + 0.1 * torch.randn(6, 7), old, advantages, mask, keep, correction)


def rows_of(sampled: Sampled, rows) -> Sampled:
    return Sampled(**{f.name: getattr(sampled, f.name)[rows] for f in fields(sampled)})


def penalty_of(sampled: Sampled) -> torch.Tensor:
    return 0.1 * sampled.advantages * sampled.old_logps


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_the_gradient_is_that_of_reinforce(name, sampled):
    sampled = replace(sampled, old_logps=sampled.logps.detach(), keep=None, correction=None)
    logps = sampled.logps.requires_grad_()
    # The ratio of whole completions has the gradient of all its tokens' sum; a regression that of the square.
    reduction = sequence_sum if name in ("rloo", "a2po") else POLICY_LOSSES[name].reduction
    scale = 2 * 1e-3 if name == "a2po" else 1.0
    options = NEEDED.get(name, {})
    expected = reduction(-scale * sampled.advantages * logps, sampled.mask, counts_of(sampled.mask), **options)
    expected = torch.autograd.grad(expected, logps)[0]
    torch.testing.assert_close(value_and_gradient(name, sampled)[1], expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_shares_of_micro_batches_add_up(name, sampled):
    counts = counts_of(sampled.mask)
    whole = value_and_gradient(name, sampled, counts, penalty_of(sampled))
    parts = [rows_of(sampled, rows) for rows in ([0], [1, 2, 3], [4, 5])]
    shares = [value_and_gradient(name, part, counts, penalty_of(part)) for part in parts]
    torch.testing.assert_close(sum(share[0] for share in shares), whole[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(torch.cat([share[1] for share in shares]), whole[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_order_of_rows_is_nothing(name, sampled):
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    value, gradient = value_and_gradient(name, sampled)
    moved, moved_gradient = value_and_gradient(name, rows_of(sampled, order))
    torch.testing.assert_close(moved, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(moved_gradient, gradient[order], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_what_is_masked_reaches_neither_value_nor_gradient(name, sampled):
    value, gradient = value_and_gradient(name, sampled, penalty=penalty_of(sampled))
    outside = sampled.mask == 0
    for rubbish in (torch.nan, torch.inf, 30.0):
        spoiled = {
            f.name: getattr(sampled, f.name).expand(6, 7).masked_fill(outside, rubbish)
            for f in fields(sampled)
            if f.name != "mask"
        }
        penalty = penalty_of(sampled).masked_fill(outside, rubbish)
        other, other_gradient = value_and_gradient(name, replace(sampled, **spoiled), penalty=penalty)
        torch.testing.assert_close(other, value, rtol=1e-12, atol=0)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-12, atol=0)
        assert (other_gradient[outside] == 0).all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_empty_row_counts_for_nothing(name, sampled):
    with_empty = rows_of(sampled, [0, 1, 2, 3, 4, 5, 5])
    with_empty.mask[6] = 0
    value, gradient = value_and_gradient(name, sampled)
    other, other_gradient = value_and_gradient(name, with_empty)
    torch.testing.assert_close(other, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(other_gradient[:6], gradient, rtol=1e-12, atol=0)
    assert (other_gradient[6] == 0).all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_tokens_that_are_left_out_have_no_gradient(name, sampled):
    #  Row 1 is left out as a whole, the others in part.
    sampled.keep[1] = 0
    without = value_and_gradient(name, sampled)[1] * sampled.mask
    assert (without[1] == 0).all()
    assert (without[sampled.keep == 0] == 0).all() == POLICY_LOSSES[name].selects_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_far_inputs_stay_finite(name, dtype):
    far = torch.tensor([-1e4, -50.0, -1e-9, 0.0], dtype=dtype)
    logps, old = (x.flatten().expand(2, 16) for x in torch.meshgrid(far, far, indexing="ij"))
    advantages = torch.tensor([[10.0], [-10.0]], dtype=dtype)
    for mask in (torch.ones(2, 16), torch.eye(16).repeat(2, 1)):
        rows = [x.repeat_interleave(len(mask) // 2, 0) for x in (logps, old, advantages)]
        value, gradient = value_and_gradient(name, Sampled(*rows, mask))
        assert value.dtype == dtype
        assert value.isfinite()
        assert gradient.isfinite().all()


# In these the weight is a constant to the gradient, which finite differences can't know.
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.keys() - {"cispo", "vespo", "gspo_token"}))
def test_the_gradient_is_that_of_the_value(name, sampled):
    def loss(logps):
        return POLICY_LOSSES[name](
            replace(sampled, logps=logps), counts_of(sampled.mask), penalty_of(sampled), **NEEDED.get(name, {})
        )

    assert torch.autograd.gradcheck(loss, sampled.logps.requires_grad_(), eps=1e-7)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_only_the_policy_in_training_has_a_gradient(name, sampled):
    others = ("old_logps", "advantages", "keep", "correction")
    live = replace(sampled, **{key: getattr(sampled, key).clone().requires_grad_() for key in others})
    live = replace(live, logps=sampled.logps.requires_grad_())
    POLICY_LOSSES[name](live, counts_of(sampled.mask), **NEEDED.get(name, {})).backward()
    assert live.logps.grad is not None
    assert all(getattr(live, key).grad is None for key in others)


def test_cispo_is_clipped_above_only():
    low, high = POLICY_LOSSES["cispo"].clipped(one_row(-3.0, 3.0))
    assert (low.tolist(), high.tolist()) == ([[False, False]], [[False, True]])
    assert not POLICY_LOSSES["cispo"].clipped(one_row(-3.0, 3.0, advantage=-1.0))[0].any()


def test_the_sets_name_rows():
    assert POLICY_LOSSES.keys() >= ANY_LEVEL | AGAINST_REFERENCE
