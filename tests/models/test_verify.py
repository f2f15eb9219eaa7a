"""The check that both layouts agree, on models that do and models made not to."""

import pytest
import torch
from torch.testing import assert_close

from strop.data.collate import TokenRow, collate
from strop.models.forward import use_packed_attention
from strop.models.segments import Segments
from strop.models.verify import coarsest_dtype, layouts_agree, padded_from_packed

ROWS = [
    TokenRow([11, 12, 13], None),
    TokenRow([14, 15], [14, 15], 0, {"advantages": [0.5, 1.5]}),
    TokenRow([16, 17, 18, 19], [-100, 17, 18, -100], 0, {"advantages": [1.0, 2.0, 3.0, 4.0]}),
    TokenRow([21, 22, 23], [21, 22, 23], -1, {"advantages": [7.0, 8.0, 9.0]}),
]


@pytest.fixture
def model(tiny_llama):
    with torch.no_grad():
        for parameter in tiny_llama.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    use_packed_attention(tiny_llama)
    return tiny_llama


@pytest.mark.parametrize("multiple_of", [1, 8])
def test_padded_from_packed_is_the_padded_collation(multiple_of):
    ours = padded_from_packed(collate(ROWS, "packed", 5, multiple_of), 5)
    theirs = collate(ROWS, "padded", 5)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert_close(ours[name], value, msg=name)


def both(rows=ROWS):
    packed = collate(rows, "packed", 0)
    return packed, padded_from_packed(packed, 0)


def test_a_right_model_agrees(model):
    result = layouts_agree(model, *both())
    assert result.agrees
    assert result.largest < 1e-5


def test_rows_that_see_each_other_do_not_agree(model):
    packed, padded = both()
    result = layouts_agree(model, packed | {"segments": Segments((9, 3), (-1, -1))}, padded)
    assert not result.agrees
    assert result.largest > 1e-2


def test_positions_that_do_not_restart_do_not_agree(model):
    packed, padded = both()
    positions = packed["position_ids"].clone()
    positions[0, 4:9] += 5
    assert not layouts_agree(model, packed | {"position_ids": positions}, padded).agrees


def test_a_model_that_says_nan_does_not_agree(model):
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    assert not layouts_agree(model, *both()).agrees


def test_nothing_scored_agrees(model):
    packed, padded = both()
    nothing = {"completion_mask": torch.zeros_like(packed["completion_mask"])}
    assert layouts_agree(model, packed | nothing, padded | nothing) == (0.0, 0.0, True)


def test_flags_and_random_state_stay(model):
    model.train()
    model.model.layers[0].eval()
    model.config.attention_dropout = 0.5
    before = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    layouts_agree(model, *both())
    assert [m.training for m in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_the_coarsest_type_counts(model):
    assert coarsest_dtype(model) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert coarsest_dtype(model) == torch.bfloat16
    model.lm_head.half()
    assert coarsest_dtype(model) == torch.float16
