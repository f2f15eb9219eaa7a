"""Estimates of KL, and the weight of an entropy bonus."""

import pytest
import torch

from strop.losses.penalties import KL_ESTIMATORS, EntropyController, KLController, kl_penalty

ONE = torch.ones(1, 1)


def column(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("policy", "reference", "estimator", "expected"),
    [
        (-1.0, -1.5, "k1", 0.5),
        (-1.0, -1.5, "k2", 0.125),
        (-1.0, -1.5, "k3", 0.106531),  # e^-0.5 + 0.5 - 1
        (-1.0, -0.5, "k3", 0.148721),  # e^0.5 - 0.5 - 1
        (-1.0, -1.0, "k3", 0.0),
    ],
)
def test_estimators_by_hand(policy, reference, estimator, expected):
    value = kl_penalty(column(policy), column(reference), ONE, estimator)
    assert value.item() == pytest.approx(expected, abs=5e-7)


POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators(estimator):
    #  the mean over what the policy would sample is sum p log p/q
    value = kl_penalty(POLICY.log()[None], REFERENCE.log()[None], torch.ones(1, 3), estimator)
    torch.testing.assert_close((POLICY * value).sum(), (POLICY * (POLICY / REFERENCE).log()).sum())


def gradient_of(divergence) -> torch.Tensor:
    logits = POLICY.log().requires_grad_()
    return torch.autograd.grad(divergence(logits.log_softmax(-1)[None]).sum(), logits)[0]


REVERSE = gradient_of(lambda logps: logps.exp() * (logps - REFERENCE.log()))
FORWARD = gradient_of(lambda logps: -REFERENCE * logps)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0 * REVERSE), ("k2", REVERSE), ("k3", FORWARD)])
def test_expected_gradients(estimator, expected):
    def estimate(logps):
        return POLICY * kl_penalty(logps, REFERENCE.log()[None], torch.ones(1, 3), estimator)

    torch.testing.assert_close(gradient_of(estimate), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("sampler", [POLICY, torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)])
def test_expected_gradients_with_the_ratio(estimator, sampler):
    def estimate(logps):
        return sampler * kl_penalty(
            logps, REFERENCE.log()[None], torch.ones(1, 3), estimator, log_ratio=logps - sampler.log()
        )

    torch.testing.assert_close(gradient_of(estimate), REVERSE, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_far_and_masked(estimator):
    logps = torch.tensor([[-200.0, -1e4, -1.0, torch.nan]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0]])
    value = kl_penalty(logps, torch.tensor([[-0.1, -0.1, -1e4, torch.nan]]), mask, estimator)
    (value * mask).sum().backward()
    assert value.isfinite().all()
    assert logps.grad.isfinite().all()
    assert logps.grad[0, 3] == 0
    if estimator != "k1":
        assert (value >= 0).all()


def test_the_factor_has_a_gradient_of_its_own():
    #  k3 at log ref/pi -0.5, pi/pi_old = 2: d = 2 (k3 + (1 - e^-0.5))
    logps = column(-1.0).requires_grad_()
    log_ratio = logps - (logps.detach() - torch.tensor(2.0, dtype=torch.float64).log())
    value = kl_penalty(logps, column(-1.5), ONE, "k3", log_ratio)
    value.sum().backward()
    half = column(-0.5).exp()
    torch.testing.assert_close(value, 2 * (half - 0.5))
    torch.testing.assert_close(logps.grad, 2 * (half - 0.5) + 2 * (1 - half))


def test_the_controller_holds_entropy_up():
    first = EntropyController(coef=0.5, target=0.2, delta=0.3)
    assert first.weight == 0  # nothing is known before the first step
    low = first.after(0.1)
    assert (low.coef, low.weight) == (0.8, 0.8)
    assert low.after(0.2).after(0.2).coef == 1.0  # at most 1
    high = low.after(0.3)
    assert (round(high.coef, 9), high.weight) == (0.5, 0.0)
    assert high.after(9.0).after(9.0).coef == 0.0


def test_the_controller_steers_the_divergence():
    #  e = clip(kl / target - 1, -0.2, 0.2), coef (1 + e n / horizon)
    first = KLController(coef=0.1, target=6.0, horizon=1000)
    assert first.after(6.6, 100).coef == pytest.approx(0.1 * 1.01)
    assert first.after(60.0, 100).coef == pytest.approx(0.1 * 1.02)
    assert first.after(-1.0, 100).coef == pytest.approx(0.1 * 0.98)
    assert first.after(6.0, 100).coef == pytest.approx(0.1)
    assert KLController(coef=0.1).after(60.0, 100).coef == 0.1
