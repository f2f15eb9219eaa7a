"""Numbers derivable on paper, and what each loss is meant to do. What holds for all rows is in `test_laws`."""

import math

import pytest
import torch

from strop.losses.preference import (
    DIVERGENCE_LOSSES,
    F_DIVERGENCES,
    PREFERENCE_LOSSES,
    SFT,
    Pairs,
    aot,
    aot_unpaired,
    exo_pair,
    ld_sum,
    options_of,
    robust,
    sigmoid,
    wpo_weight,
)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def softplus(z: float) -> float:
    return math.log1p(math.exp(z))


def sigma(z: float) -> float:
    return 1 / (1 + math.exp(-z))


#  chosen: policy -4.0, reference -5.2, 4 tokens; rejected: policy -6.4, reference -6.0, 2 tokens
PAIR = Pairs(column(1.2), column(-0.4), torch.tensor([4]), torch.tensor([2]))
BETA = 0.1
#  margin 1.6, per token 1.2 / 4 + 0.4 / 2 = 0.5; rewards 0.12 and -0.04


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sigmoid", {}, softplus(-0.16)),
        ("sigmoid", {"smoothing": 0.1}, 0.9 * softplus(-0.16) + 0.1 * softplus(0.16)),
        ("sigmoid_norm", {}, softplus(-0.05)),
        ("robust", {"smoothing": 0.1}, (0.9 * softplus(-0.16) - 0.1 * softplus(0.16)) / 0.8),
        ("hinge", {}, 1 - 0.16),
        ("ipo", {}, (0.5 - 5) ** 2),
        (
            "exo_pair",
            {"smoothing": 0.1},
            sigma(0.16) * math.log(sigma(0.16) / 0.9) + sigma(-0.16) * math.log(sigma(-0.16) / 0.1),
        ),
        ("nca_pair", {}, softplus(-0.12) + 0.5 * softplus(0.12) + 0.5 * softplus(-0.04)),
        ("bco_pair", {}, softplus(-0.12) + softplus(-0.04)),
        ("sppo_hard", {}, (1.2 - 5) ** 2 + (-0.4 + 5) ** 2),
        ("apo_zero", {}, 1 - sigma(0.12) + sigma(-0.04)),
        ("apo_down", {}, sigma(0.12) + 1 - sigma(0.16)),
        ("discopop", {}, softplus(-0.16) * sigma(-3.2) + math.exp(-0.16) * sigma(3.2)),
        ("aot", {}, softplus(-0.16)),  # of one pair the only quantile
        ("aot_unpaired", {}, softplus(-0.16)),
    ],
)
def test_by_hand(name, options, expected):
    torch.testing.assert_close(PREFERENCE_LOSSES[name](PAIR, BETA, **options), column(expected))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sigmoid", {}, 0.616344),
        ("hinge", {}, 0.84),
        ("ipo", {}, 20.25),
        ("sigmoid_norm", {}, 0.668460),
        ("sigmoid", {"smoothing": 0.1}, 0.632344),
        ("robust", {"smoothing": 0.1}, 0.596344),
        ("apo_zero", {}, 0.960037),
        ("apo_down", {}, 0.990049),
    ],
)
def test_the_numbers_that_users_compare(name, options, expected):
    assert PREFERENCE_LOSSES[name](PAIR, BETA, **options).item() == pytest.approx(expected, abs=5e-7)


def test_an_empty_side_has_mean_zero():
    assert Pairs(column(0.0), column(3.0), torch.tensor([0]), torch.tensor([2])).mean_margin.tolist() == [-1.5]


def test_robust_is_unbiased_under_flipped_labels():
    flipped = Pairs(PAIR.rejected, PAIR.chosen, PAIR.rejected_length, PAIR.chosen_length)
    mean = 0.7 * robust(PAIR, BETA, smoothing=0.3) + 0.3 * robust(flipped, BETA, smoothing=0.3)
    torch.testing.assert_close(mean, sigmoid(PAIR, BETA))


def test_exo_is_zero_where_the_policy_prefers_as_often_as_the_label_is_right():
    margin = math.log(0.8 / 0.2) / BETA  # sigmoid(beta * margin) = 0.8
    there = Pairs(column(margin), column(0.0), torch.ones(1), torch.ones(1))
    torch.testing.assert_close(exo_pair(there, BETA, smoothing=0.2), column(0.0))


@pytest.mark.parametrize(("loss", "smoothing"), [(robust, 0.5), (exo_pair, 0.0), (exo_pair, 0.5)])
def test_a_smoothing_that_breaks_the_formula_is_refused(loss, smoothing):
    with pytest.raises(ValueError, match=f"smoothing={smoothing}"):
        loss(PAIR, BETA, smoothing=smoothing)


def test_aot_compares_quantiles_with_the_reference():
    #  policy margins 1 + 2, 4 + 0, 0 + 5 = 3, 4, 5; the reference's sorted 0, 2, 5: quantile by quantile 3, 2, 0
    ones = torch.ones(3)
    pairs = Pairs(column(1, 3, 2), column(0, -1, 2), ones, ones, reference_margin=column(2, 0, 5))
    torch.testing.assert_close(aot(pairs, 1.0), column(softplus(-3), softplus(-2), softplus(0)))


def test_a_pair_owns_its_value_of_aot():
    chosen = column(1, 3, 2).requires_grad_()
    pairs = Pairs(chosen, column(0, -1, 2), torch.ones(3), torch.ones(3), reference_margin=column(2, 0, 5))
    aot(pairs, 1.0)[1].backward()
    assert (chosen.grad != 0).tolist() == [False, True, False]


def test_aot_unpaired_pairs_anew():
    #  chosen 1, 3 and rejected 5, 0: 1 stands against 0, 3 against 5
    pairs = Pairs(column(3, 1), column(5, 0), torch.ones(2), torch.ones(2))
    torch.testing.assert_close(aot_unpaired(pairs, 1.0), column(softplus(2), softplus(-1)))


def test_options_are_read_off_the_signature():
    options = {name: options_of(loss) for name, loss in PREFERENCE_LOSSES.items() if options_of(loss)}
    smoothed = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
    assert options == {"discopop": {"tau"}} | {name: {"smoothing"} for name in smoothed}
    assert options_of(lambda p, beta, *rest, power=2, **others: p.margin) == {"power"}


def test_the_names_are_those_that_users_know():
    assert PREFERENCE_LOSSES.keys() | {SFT} == {
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
        *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    }
    assert PREFERENCE_LOSSES.keys() > DIVERGENCE_LOSSES


CONVEX = {
    "reverse_kl": lambda u: u * u.log(),
    "forward_kl": lambda u: -u.log(),
    "js_divergence": lambda u: u * u.log() - (u + 1) * ((u + 1) / 2).log(),
    "alpha_divergence": lambda u: (u**0.3 - 0.3 * u - 0.7) / (0.3 * (0.3 - 1)),
}


@pytest.mark.parametrize("name", F_DIVERGENCES)
def test_a_divergence_maps_to_the_derivative_of_its_convex_function(name):
    log_ratio = column(-3, -0.5, 0, 0.1, 2)
    options = {"alpha": 0.3} if name == "alpha_divergence" else {}

    def derivative(u):
        u = u.detach().requires_grad_()
        return torch.autograd.grad(CONVEX[name](u).sum(), u)[0]

    expected = derivative(log_ratio.exp()) - derivative(torch.ones_like(log_ratio))
    torch.testing.assert_close(F_DIVERGENCES[name](log_ratio, **options), expected)


@pytest.mark.parametrize(("alpha", "same_as"), [(1.0, "reverse_kl"), (1 + 1e-9, "reverse_kl"), (0.0, "forward_kl")])
def test_alpha_divergence_joins_both_kl(alpha, same_as):
    log_ratio = column(-3, -0.5, 0, 2)
    mine = F_DIVERGENCES["alpha_divergence"](log_ratio, alpha=alpha)
    torch.testing.assert_close(mine, F_DIVERGENCES[same_as](log_ratio), rtol=1e-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", F_DIVERGENCES)
def test_divergences_stay_finite_in_every_dtype(name, dtype):
    log_ratio = torch.tensor([-1e4, -30, 0, 30, 1e4], dtype=dtype, requires_grad=True)
    score = F_DIVERGENCES[name](log_ratio)
    score.sum().backward()
    assert score.dtype == dtype
    assert score.isfinite().all()
    assert log_ratio.grad.isfinite().all()


MASK = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]])


def test_wpo_weighs_by_how_usual_a_token_is():
    #  log p - log sum p^2: (-1 + 1, -3 + 1, -1.2 + 1) has mean -11/15; (-1, -2) + 1.5 has mean 0
    logps = torch.tensor([[torch.nan, -1, -3, -1.2, 0], [-1, -2, 0, 0, torch.nan]], requires_grad=True)
    collision = torch.tensor([[torch.nan, -1, -1, -1, 9], [-1.5, -1.5, 9, 9, torch.nan]])
    weight = wpo_weight(logps, collision, MASK)
    torch.testing.assert_close(weight, torch.tensor([math.exp(-11 / 15), 1.0]))
    assert not weight.requires_grad


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, -6.0), (0.0, -3.0), (0.5, -4.5)])
def test_ld_weighs_what_only_the_longer_side_has(alpha, expected):
    logps = torch.tensor([[torch.nan, -1, -2, -3, torch.nan], [-1, -2, torch.nan, 0, 0]], requires_grad=True)
    value = ld_sum(logps, MASK, torch.tensor([2, 2]), alpha)
    value.sum().backward()
    assert value.tolist() == [expected, -3.0]
    assert logps.grad.tolist() == [[0, 1, 1, alpha, 0], [1, 1, 0, 0, 0]]
