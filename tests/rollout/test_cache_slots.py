"""A slot a row says what a prompt stored once says, in one call of attention a layer."""

import pytest
import torch
from torch.nn import functional as F

from strop.rollout import cache_slots, generator_stream
from strop.rollout.cache_slots import SlotCache
from strop.rollout.generator import InProcessGenerator
from strop.rollout.types import Sampling

from .test_generator import FAMILIES, PROMPTS, SAMPLED, causal_lm, llama, texts

BUDGETS = [3, 10, 5, 10, 1, 10, 8]


@pytest.fixture
def in_slots(monkeypatch):
    """Write with slots, whatever the device."""
    caches = []

    def switch():
        monkeypatch.setattr(generator_stream, "cache_on", lambda device: caches.append(SlotCache()) or caches[-1])
        return caches

    return switch


@pytest.mark.parametrize("max_rows", [3, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_writes_the_same(name, max_rows, in_slots, monkeypatch):
    monkeypatch.setattr(cache_slots, "FIRST_TOKENS", 2)  # blocks grow
    model = causal_lm(FAMILIES[name]())
    expected = InProcessGenerator(model, max_rows=max_rows).generate(PROMPTS, SAMPLED, max_tokens=BUDGETS)
    caches = in_slots()
    generator = InProcessGenerator(model, max_rows=max_rows)
    written = generator.generate(PROMPTS, SAMPLED, max_tokens=BUDGETS)
    assert generator.obstacle is None
    assert len(caches) == 1
    assert texts(written) == texts(expected)
    for one, two in zip(written, expected, strict=True):
        assert one.logps == pytest.approx(two.logps, abs=1e-5)


def test_a_step_is_one_call_of_attention_a_layer(in_slots, monkeypatch):
    in_slots()
    calls, attention = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda query, *rest, **options: calls.append(len(query)) or attention(query, *rest, **options),
    )
    monkeypatch.setattr(InProcessGenerator, "_check", lambda *args: None)
    model = llama()
    InProcessGenerator(model).generate(
        [[5, 6], [5, 6], [7], [8, 9, 10]], Sampling(max_tokens=4), max_tokens=[4, 4, 2, 3]
    )
    prompts, layers = 3, model.config.num_hidden_layers
    assert calls == [1] * prompts * layers + [4] * layers + [3] * layers + [2] * layers


def test_slots_are_filled_again_and_blocks_let_go(in_slots, monkeypatch):
    caches = in_slots()
    sizes, leave = [], SlotCache.leave

    def watch(self, done):
        leave(self, done)
        sizes.append(len(self.keys[0]) if self.keys else 0)

    monkeypatch.setattr(SlotCache, "leave", watch)
    rows = InProcessGenerator(llama(), max_rows=3).generate(
        PROMPTS * 3, Sampling(max_tokens=5), max_tokens=[5, 1, 3] * 7
    )
    assert [len(row.token_ids) for row in rows] == [5, 1, 3] * 7
    assert max(sizes) <= 3
    assert caches[0].keys == caches[0].values == caches[0].rows == []


def test_sixteen_bits(in_slots):
    in_slots()
    model = llama(initializer_range=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        generator = InProcessGenerator(model)
        assert [len(c.token_ids) for c in generator.generate(PROMPTS, SAMPLED)] == [10] * len(PROMPTS)
    assert generator.obstacle is None
