"""Scores under a head against their definitions, for every tile size, dtype and kind of gradient."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from strop.models.head import HeadScores, LogitTransform, Scoring, score_head, score_linear, score_module, tiling

M, D, V = 11, 6, 13
ALL = {"entropy": True, "top1": True, "mean_logps": True, "collision": True}
TRANSFORMS = {
    "plain": LogitTransform(),
    "scaled": LogitTransform(scale=0.25),
    "warm": LogitTransform(temperature=0.7),
    "capped": LogitTransform(scale=1.3, softcap=2.0, temperature=0.7),
}
BUDGETS = {"whole": None, "half kept": 6 * 2 * V * 8, "none kept": 3 * V * 8, "a token a tile": 1}


def definition(hidden, weight, bias, targets, transform) -> HeadScores:
    """All scores, from all logits at once."""
    z = F.linear(hidden, weight, bias) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    logps = (z / transform.temperature).log_softmax(-1)
    return HeadScores(
        logps.gather(-1, targets[:, None]).squeeze(-1),
        -(logps.exp() * logps).sum(-1),
        (logps.argmax(-1) == targets).to(logps),
        logps.mean(-1),
        (2 * logps).logsumexp(-1),
    )


def case(dtype=torch.float64, bias=True, requires_grad=True):
    shapes = (M, D), (V, D), (V,)
    hidden, weight, b = (torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes)
    return hidden, weight, b if bias else None, torch.randint(V, (M,))


def as_module(hidden, weight, bias, targets, scoring):
    return score_module(lambda x: F.linear(x, weight, bias), hidden, targets, scoring)


def gradients(scores: HeadScores, read, inputs):
    """Of a loss that weighs every token of the scores in `read` differently."""
    weights = torch.linspace(-1, 2, M, dtype=scores.logps.dtype)
    loss = sum((i + 1) * (getattr(scores, name) * weights).sum() for i, name in enumerate(read))
    return torch.autograd.grad(loss, inputs, retain_graph=True)


@pytest.mark.parametrize("score", [score_linear, as_module])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_values_and_gradients_are_the_definitions(transform, budget, bias, score):
    hidden, weight, b, targets = case(bias=bias)
    scores = score(hidden, weight, b, targets, Scoring(TRANSFORMS[transform], **ALL, budget=BUDGETS[budget]))
    expected = definition(hidden, weight, b, targets, TRANSFORMS[transform])
    torch.testing.assert_close(scores, expected)
    inputs = [x for x in (hidden, weight, b) if x is not None]
    for read in (["logps"], ["mean_logps"], ["entropy"], ["logps", "mean_logps"], ["logps", "entropy", "mean_logps"]):
        torch.testing.assert_close(gradients(scores, read, inputs), gradients(expected, read, inputs))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_are_finite_differences(transform):
    hidden, weight, bias, targets = case()

    def differentiable(*inputs):
        scores = score_linear(*inputs, targets, Scoring(TRANSFORMS[transform], **ALL, budget=4 * V * 8))
        return scores.logps, scores.entropy, scores.mean_logps

    assert torch.autograd.gradcheck(differentiable, (hidden, weight, bias))


def test_golden():
    golden = json.loads((Path(__file__).parents[1] / "goldens" / "fused_lm_head.json").read_text())
    hidden, weight, bias = (torch.tensor(golden["input"][name]) for name in ("hidden", "weight", "bias"))
    hidden.requires_grad_(), weight.requires_grad_()
    targets = torch.tensor(golden["input"]["targets"])
    for c in golden["cases"]:
        transform = LogitTransform(c["logit_scale"], c["softcap"], c["temperature"])
        b = bias if c["bias"] else None
        scores = score_linear(hidden, weight, b, targets, Scoring(transform, **ALL))
        torch.testing.assert_close(scores.logps, torch.tensor(c["log_probs"]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scores.entropy, torch.tensor(c["entropy"]), rtol=1e-5, atol=1e-5)
        assert scores.is_top1.bool().tolist() == [bool(x) for x in c["is_top1"]]
        # mean_v logp = mean_v z - logsumexp(z) = mean_v z - (z[target] - logp)
        z = F.linear(hidden, weight, b).double() * c["logit_scale"]
        z = (z if c["softcap"] is None else c["softcap"] * (z / c["softcap"]).tanh()) / c["temperature"]
        mean_logits = scores.mean_logps + z.gather(-1, targets[:, None]).squeeze(-1) - scores.logps
        torch.testing.assert_close(mean_logits.float(), torch.tensor(c["mean_logits"]), rtol=1e-5, atol=1e-5)
        d_hidden, d_weight = torch.autograd.grad((scores.logps + 0.3 * scores.entropy).sum(), (hidden, weight))
        torch.testing.assert_close(d_hidden, torch.tensor(c["hidden_gradient"]), rtol=1e-5, atol=1e-5)
        assert d_weight.abs().sum().item() == pytest.approx(c["weight_gradient_abs_sum"], rel=1e-5)


def test_among_equal_logits_the_first_is_the_top():
    #  logits of the only row: 1 3 3 0
    weight = torch.tensor([[1.0], [3.0], [3.0], [0.0]])
    scores = score_linear(torch.ones(4, 1), weight, None, torch.arange(4), Scoring(top1=True))
    assert scores.is_top1.tolist() == [0, 1, 0, 0]


def test_far_logits_stay_finite():
    #  logits 1e4 and 0: p = (1, 0), logps (0, -1e4), entropy 0, mean_logp -5e3; dlogp/dz = (0, 0) and (-1, 1)
    hidden, weight = torch.ones(2, 1, requires_grad=True), torch.tensor([[1e4], [0.0]], requires_grad=True)
    scores = score_linear(hidden, weight, None, torch.tensor([0, 1]), Scoring(**ALL))
    torch.testing.assert_close(scores.logps, torch.tensor([0.0, -1e4]))
    torch.testing.assert_close(scores.mean_logps, torch.tensor([-5e3, -5e3]))
    torch.testing.assert_close(scores.entropy, torch.zeros(2))
    (scores.logps + scores.entropy).sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[-1.0], [1.0]]))


def test_uniform_logits():
    scores = score_linear(torch.zeros(3, D), torch.randn(V, D), None, torch.tensor([0, 5, 12]), Scoring(**ALL))
    torch.testing.assert_close(scores.logps, torch.full((3,), -math.log(V)))
    torch.testing.assert_close(scores.entropy, torch.full((3,), math.log(V)))
    torch.testing.assert_close(scores.mean_logps, torch.full((3,), -math.log(V)))
    assert scores.is_top1.tolist() == [1, 0, 0]


@pytest.mark.parametrize("score", [score_linear, as_module])
def test_no_tokens_give_zero_gradients(score):
    hidden, weight, bias, targets = case()
    scores = score(hidden[:0], weight, bias, targets[:0], Scoring(**ALL, budget=1))
    assert scores.logps.shape == scores.entropy.shape == (0,)
    scores.logps.sum().backward()
    assert weight.grad.abs().sum() == bias.grad.abs().sum() == hidden.grad.abs().sum() == 0


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_frozen_head_gets_no_gradient_and_keeps_no_logits(budget):
    hidden, weight, bias, targets = case()
    frozen, frozen_bias = weight.detach(), bias.detach()
    with Allocations() as allocations:
        scores = score_linear(hidden, frozen, frozen_bias, targets, Scoring(budget=BUDGETS[budget]))
    kept = [x for x in scores.logps.grad_fn.saved_tensors if x is not None and x.shape[-1] == V and x.ndim == 2]
    assert kept == []
    products = allocations.calls["mm"] + allocations.calls["addmm"]
    scores.logps.sum().backward()
    expected = definition(hidden, frozen, frozen_bias, targets, LogitTransform()).logps.sum()
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected, hidden)[0])
    tokens, _ = tiling(V, torch.float64, hidden.device, BUDGETS[budget])
    assert products == 2 * math.ceil(M / tokens)


@pytest.mark.parametrize("score", [score_linear, as_module])
def test_without_grad_mode_nothing_is_kept(score):
    hidden, weight, bias, targets = case()
    expected = definition(hidden, weight, bias, targets, LogitTransform())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            scores = score(hidden, weight, bias, targets, Scoring(**ALL, budget=3 * V * 8))
        assert not scores.logps.requires_grad
        torch.testing.assert_close(scores, HeadScores(*(x.detach() for x in expected)))


def test_backward_may_run_twice():
    hidden, weight, bias, targets = case()
    scores = score_linear(hidden, weight, bias, targets, Scoring(TRANSFORMS["capped"], **ALL))
    first, second = (gradients(scores, ["logps", "entropy"], (hidden, weight, bias)) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype):
    """Scores are float32 numbers of rounded logits; gradients come in the inputs' dtype."""
    hidden, weight, bias, targets = case(dtype)
    scores = score_linear(hidden, weight, bias, targets, Scoring(**ALL, budget=3 * V * 8))
    logits = F.linear(hidden, weight, bias)
    z = logits.float()
    assert scores.logps.dtype == scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.logps, z.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1))
    reference = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    for read in (["logps", "mean_logps"], ["logps", "entropy"]):
        ours = gradients(scores, read, (hidden, weight, bias))
        exact = gradients(definition(*reference, targets, LogitTransform()), read, reference)
        for x, y in zip(ours, exact, strict=True):
            assert x.dtype == dtype
            torch.testing.assert_close(x.double(), y, rtol=0, atol=4e-2 * y.abs().max().item())


def test_autocast_multiplies_in_its_dtype_and_counts_in_float32():
    hidden, weight, bias, targets = case(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score_linear(hidden, weight, bias, targets, Scoring(**ALL))
        logits = F.linear(hidden, weight, bias)
    assert logits.dtype == torch.bfloat16
    expected = logits.float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(scores.logps, expected)
    scores.logps.sum().backward()
    assert weight.grad.dtype == torch.float32
    exact = torch.autograd.grad(definition(hidden, weight, bias, targets, LogitTransform()).logps.sum(), weight)[0]
    torch.testing.assert_close(weight.grad, exact, rtol=0, atol=4e-2 * exact.abs().max().item())


class Allocations(TorchDispatchMode):
    """Bytes of the largest vocabulary-wide tensor of tokens, and calls of each operator."""

    def __init__(self):
        super().__init__()
        self.largest, self.calls = 0, {"mm": 0, "addmm": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.calls:
            self.calls[name] += 1
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (V,) and out.shape[0] != D:
            self.largest = max(self.largest, out.numel() * out.element_size())
        return out


@pytest.mark.parametrize("score", [score_linear, as_module])
@pytest.mark.parametrize("transform", ["plain", "capped"])
@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_no_tensor_of_logits_exceeds_the_budget(tokens, transform, score):
    hidden, weight, bias, targets = case()
    budget = tokens * V * 8
    with Allocations() as allocations:
        scores = score(hidden, weight, bias, targets, Scoring(TRANSFORMS[transform], **ALL, budget=budget))
        torch.autograd.backward(sum(getattr(scores, name).sum() for name in ("logps", "entropy", "mean_logps")))
    assert 0 < allocations.largest <= budget


@pytest.mark.parametrize("budget", [1, 1000, V * 4 * 10, 10**6])
def test_tiles_in_work_and_kept_fit_the_budget_together(budget):
    tokens, kept = tiling(V, torch.float32, torch.device("cpu"), budget)
    assert tokens >= 1
    assert tokens == 1 or (kept + 1) * tokens * V * 4 <= budget
    assert (kept + 2) * tokens * V * 4 > budget


def test_a_head_with_its_own_forward_is_called():
    """A subclass of Linear that computes something else, as quantised layers do, is not read as a matrix."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    hidden, _, _, targets = case()
    head = Doubled(D, V).double()
    scores = score_head(head, hidden, targets, Scoring(**ALL), head.forward)
    expected = definition(hidden, head.weight, head.bias, targets, LogitTransform(scale=2.0))
    torch.testing.assert_close(scores, expected)
