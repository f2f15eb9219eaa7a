"""Activation checkpointing: the same gradients, attention computed once where it is selective, and what is refused."""

from collections import Counter
from copy import deepcopy

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from strop.models.adapters import apply_peft
from strop.models.checkpointing import wire_checkpointing

IDS = torch.arange(40).view(2, 20)


class Counting(TorchDispatchMode):
    """Counts the operators that run under it."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def step(model) -> tuple[list[torch.Tensor], Counter]:
    """Gradients of a step, and how often each operator ran in it."""
    model.train()
    model.zero_grad()
    with Counting() as counting:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad], counting.counts


def attention_runs(counts: Counter) -> int:
    return sum(n for name, n in counts.items() if "attention" in name and "backward" not in name)


def enable(model, kwargs):
    """As a trainer does it: our part at construction, transformers' when training begins."""
    wire_checkpointing(model, kwargs)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs, every_n_layers=1, offload=False)


def test_selective_checkpointing_runs_attention_once_and_the_rest_twice(tiny_llama):
    expected, plain = step(tiny_llama)
    everything, selective = deepcopy(tiny_llama), deepcopy(tiny_llama)
    enable(everything, None)
    enable(selective, {"selective": True})
    all_gradients, all_counts = step(everything)
    gradients, counts = step(selective)
    assert all(map(torch.equal, all_gradients, expected))
    assert all(map(torch.equal, gradients, expected))
    assert (attention_runs(plain), attention_runs(all_counts), attention_runs(counts)) == (2, 4, 2)
    assert counts["aten::silu"] == all_counts["aten::silu"] == 2 * plain["aten::silu"]


@pytest.mark.parametrize("kwargs", [None, {"selective": True}, {"use_reentrant": True}])
def test_adapters_get_the_same_gradients(tiny_llama, kwargs):
    model = apply_peft(tiny_llama, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    expected, _ = step(model)
    enable(model, kwargs)
    gradients, _ = step(model)
    assert all(map(torch.equal, gradients, expected))
    assert all(grad.abs().max() > 0 for grad in gradients)


def test_a_copy_of_a_wired_model_checkpoints_itself(tiny_llama):
    """E.g. a reference model: what was wired into the original must not reach back to it."""
    wire_checkpointing(tiny_llama, {"selective": True})
    copy = deepcopy(tiny_llama)
    copy.activation_checkpointing_enable({"selective": True})
    assert (copy.is_activation_checkpointing, tiny_llama.is_activation_checkpointing) == (True, False)


def test_options_may_come_as_json(tiny_llama):
    with pytest.raises(ValueError, match="can't be selective and reentrant"):
        wire_checkpointing(tiny_llama, '{"selective": true, "use_reentrant": true}')


def test_selective_needs_an_attention_kernel(tiny_llama):
    tiny_llama.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match='attn_implementation="eager" calls none'):
        wire_checkpointing(tiny_llama, {"selective": True})


def test_unknown_options_are_named(tiny_llama):
    with pytest.raises(ValueError, match=r"'use_rentrant'\. Did you mean 'use_reentrant'"):
        wire_checkpointing(tiny_llama, {"use_rentrant": False})
