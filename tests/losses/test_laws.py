"""What holds for every row of every table, so that a new loss is tested by being registered."""

import math

import pytest
import torch

from strop.losses.preference import DIVERGENCE_LOSSES, F_DIVERGENCES, PREFERENCE_LOSSES, Pairs
from strop.losses.reference_free import REFERENCE_FREE_LOSSES
from strop.losses.reward import bradley_terry, centring, plackett_luce, step_cross_entropy
from strop.losses.unpaired import UNPAIRED_LOSSES

BETA = 0.1
NUM_PAIRS = 6

# A row becomes a function of `values` (B, 2), a better and a worse completion, and `facts` (B, 3): both lengths and the
# reference's margin. It returns (B,); a loss of single completions is added up over both.


def of_pairs(loss, score=lambda x: x):
    def row(values, facts):
        lengths = facts[:, :2].long()
        reference_margin = facts[:, 2].to(values.dtype)
        return loss(Pairs(*score(values).unbind(-1), *lengths.unbind(-1), reference_margin), BETA)

    return row


def of_single(loss):
    def row(values, facts):
        labels = torch.tensor([True, False]).expand(len(values), 2).flatten()
        return loss(values.flatten(), labels, values.new_zeros(()), BETA).view(-1, 2).sum(-1)

    return row


RELATIVE = {f"preference.{name}": of_pairs(loss) for name, loss in PREFERENCE_LOSSES.items()}
RELATIVE |= {
    f"{divergence}.{name}": of_pairs(PREFERENCE_LOSSES[name], score)
    for divergence, score in F_DIVERGENCES.items()
    for name in sorted(DIVERGENCE_LOSSES)
    if divergence != "reverse_kl"
}
RELATIVE |= {f"unpaired.{name}": of_single(loss) for name, loss in UNPAIRED_LOSSES.items()}
"""Rows that read log pi/ref."""

ROWS = RELATIVE | {f"reference_free.{name}": of_pairs(loss) for name, loss in REFERENCE_FREE_LOSSES.items()}
ROWS |= {
    "reward.bradley_terry": lambda values, facts: bradley_terry(*values.unbind(-1), margin=0.5),
    "reward.centring": lambda values, facts: centring(*values.unbind(-1)),
    "reward.plackett_luce": lambda values, facts: plackett_luce(values, torch.ones_like(values)),
    "reward.step": lambda values, facts: step_cross_entropy(values.flip(-1), torch.ones(len(values))),
}


@pytest.fixture
def values():
    """Between -4 and 0, so that they may be log-probabilities too, and apart from each other."""
    torch.manual_seed(3)
    return -4 * torch.rand(NUM_PAIRS, 2, dtype=torch.float64)


@pytest.fixture
def facts():
    torch.manual_seed(4)
    return torch.cat([torch.randint(1, 9, (NUM_PAIRS, 2)), torch.randint(-9, 9, (NUM_PAIRS, 1))], -1)


def value_and_gradient(row, values, facts):
    values = values.detach().requires_grad_()
    losses = row(values, facts)
    return losses.detach(), torch.autograd.grad(losses.sum(), values)[0]


@pytest.mark.parametrize("name", ROWS)
def test_one_loss_a_pair_whatever_the_order(name, values, facts):
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    losses, gradient = value_and_gradient(ROWS[name], values, facts)
    assert losses.shape == (NUM_PAIRS,)
    moved, moved_gradient = value_and_gradient(ROWS[name], values[order], facts[order])
    torch.testing.assert_close(moved, losses[order], rtol=1e-13, atol=0)
    torch.testing.assert_close(moved_gradient, gradient[order], rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("name", [n for n in ROWS if n.split(".")[1] not in ("aot", "aot_unpaired")])
def test_pairs_of_a_batch_do_not_meet(name, values, facts):
    losses, gradient = value_and_gradient(ROWS[name], values, facts)
    alone = [value_and_gradient(ROWS[name], values[i : i + 1], facts[i : i + 1]) for i in range(NUM_PAIRS)]
    torch.testing.assert_close(torch.cat([loss for loss, _ in alone]), losses)
    torch.testing.assert_close(torch.cat([grad for _, grad in alone]), gradient)


@pytest.mark.parametrize("name", ROWS)
def test_the_gradient_is_that_of_the_value(name, values, facts):
    assert torch.autograd.gradcheck(lambda x: ROWS[name](x, facts), values.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ROWS)
def test_far_inputs_stay_finite(name, dtype, facts):
    corners = torch.tensor([[1e4, 1e4], [1e4, -1e4], [-1e4, 1e4], [-1e4, -1e4], [0.0, 1e4], [-1e4, 0.0]], dtype=dtype)
    losses, gradient = value_and_gradient(ROWS[name], corners, facts)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROWS)
def test_the_dtype_is_kept(name, dtype, values, facts):
    assert ROWS[name](values.to(dtype), facts).dtype == dtype


@pytest.mark.parametrize("name", sorted(ROWS.keys() - {"reward.centring"}))
def test_better_up_and_worse_down_lowers_the_loss(name, facts):
    # discopop is published with a hump around a margin of 0, and falls beyond it.
    start = [2.0, -8.0] if name.endswith("discopop") else [-3.0, -3.0]
    _, gradient = value_and_gradient(ROWS[name], torch.tensor([start], dtype=torch.float64), facts[:1])
    better, worse = gradient[0]
    assert better < 0 < worse


AT_START = {
    "sigmoid": math.log(2),
    "sigmoid_norm": math.log(2),
    "robust": math.log(2),
    "hinge": 1.0,
    "ipo": (1 / (2 * BETA)) ** 2,
    "exo_pair": -math.log(2) - 0.5 * math.log(1e-3 * (1 - 1e-3)),
    "nca_pair": 2 * math.log(2),
    "bco_pair": 2 * math.log(2),
    "sppo_hard": 2 * (1 / (2 * BETA)) ** 2,
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "discopop": 0.5 * math.log(2) + 0.5,
    "aot": math.log(2),
    "aot_unpaired": math.log(2),
    "kto": 2 * 0.5,
    "apo_zero_unpaired": 2 * 0.5,
    "bco": 2 * math.log(2),
}


@pytest.mark.parametrize("name", RELATIVE)
def test_the_first_step_of_a_policy_that_is_its_reference(name, facts):
    losses = RELATIVE[name](torch.zeros(NUM_PAIRS, 2, dtype=torch.float64), facts)
    torch.testing.assert_close(losses, torch.full_like(losses, AT_START[name.split(".")[1]]))
