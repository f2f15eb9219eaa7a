"""Values and gradients derivable on paper."""

import math

import pytest
import torch

from strop.losses.supervised import SUPERVISED_LOSSES, dft, label_smoothed, nll


def test_nll_is_minus_log_p():
    torch.testing.assert_close(nll(torch.tensor([[0.5, 0.25]]).log()), torch.tensor([[math.log(2), math.log(4)]]))


def test_dft_weighs_by_the_probability_without_a_gradient_through_it():
    #  p = 1/2: loss 1/2 * log 2; d/d logp = -p = -1/2, where a weight with a gradient would give -(log p + 1) p
    logps = torch.tensor([[0.5]]).log().requires_grad_()
    loss = dft(logps)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([[0.5 * math.log(2)]]))
    torch.testing.assert_close(logps.grad, torch.tensor([[-0.5]]))


def test_label_smoothing_is_cross_entropy_with_a_mixed_target():
    torch.manual_seed(0)
    logits, target = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 3, 6, 2, 2])
    all_logps = logits.log_softmax(-1)
    logps = all_logps.gather(-1, target[:, None])[:, 0]
    mine = label_smoothed(nll(logps), all_logps.mean(-1), 0.1).mean()
    torch.testing.assert_close(mine, torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1))


@pytest.mark.parametrize("name", sorted(SUPERVISED_LOSSES))
def test_far_inputs_stay_finite(name):
    logps = torch.tensor([[-1e4, -1e-8, 0.0]], requires_grad=True)
    loss = SUPERVISED_LOSSES[name](logps)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logps.grad.isfinite().all()
