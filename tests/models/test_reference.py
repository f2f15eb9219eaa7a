"""The reference stays what the model was, whatever becomes of it, in as little memory as possible."""

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn

from strop.data.preference import PreferenceCollator
from strop.models.forward import use_packed_attention
from strop.models.logps import logps
from strop.models.reference import (
    AdapterOff,
    FrozenModel,
    FrozenWeights,
    ModelNow,
    Precomputed,
    fingerprint,
    reference_for,
)

ROWS = [
    {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9, 2], "rejected_ids": [11, 2]},
    {"prompt_ids": [5, 12], "chosen_ids": [13, 2], "rejected_ids": [14, 15, 16, 2]},
]
BATCH = PreferenceCollator(0)(ROWS)


def trained_lora(model, name="default"):
    """An adapter that already changes the model."""
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False), adapter_name=name)


def ia3(model):
    config = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False)
    return get_peft_model(model, config)


def with_saved_head(model):
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", modules_to_save=["lm_head"]))


def partly_frozen(model):
    model.model.embed_tokens.requires_grad_(False)
    return model


MODELS = {
    "whole": (lambda model: model, FrozenModel),
    "partly frozen": (partly_frozen, FrozenWeights),
    "fresh LoRA": (lambda m: get_peft_model(m, LoraConfig(task_type="CAUSAL_LM")), AdapterOff),
    "trained LoRA": (trained_lora, FrozenWeights),
    "trained LoRA of a name": (lambda m: trained_lora(m, "mine"), FrozenWeights),
    "trained IA3": (ia3, FrozenWeights),
    "fresh LoRA and a head": (with_saved_head, FrozenWeights),
}


def train(model, steps=3):
    """As a trainer would: a gradient step on log-probabilities, with the reference asked in between."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        logps(model, BATCH).logps.sum().backward()
        optimizer.step()


def storages(*models: nn.Module) -> set[int]:
    return {p.untyped_storage().data_ptr() for model in models for p in model.parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_it_stays_bit_for_bit(tiny_llama, name):
    make, kind = MODELS[name]
    model = make(tiny_llama)
    use_packed_attention(model)
    model.train()
    reference = reference_for(model)
    assert type(reference) is kind
    flags = [p.requires_grad for p in model.parameters()]
    start = logps(copy.deepcopy(model).eval(), BATCH).logps.detach()
    for _ in range(2):
        found = reference.logps(BATCH)
        assert torch.equal(found, start)
        assert not found.requires_grad
        train(model)
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == flags
    assert not torch.equal(logps(model, BATCH).logps, start)


def test_asking_changes_no_gradient(tiny_llama):
    """Also between a forward pass and its backward, with checkpoints that are computed anew in between."""
    model = trained_lora(tiny_llama)
    use_packed_attention(model)
    model.activation_checkpointing_enable()
    model.enable_input_require_grads()
    reference = reference_for(model)
    train(model, 1)
    gradients = []
    for asked in (False, True):
        model.zero_grad()
        loss = logps(model, BATCH).logps.sum()
        if asked:
            reference.logps(BATCH)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert gradients[0]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "whole"])
def test_one_set_of_base_weights(tiny_llama, name):
    model = MODELS[name][0](tiny_llama)
    before = storages(model)
    reference = reference_for(model)
    assert reference.model is model
    own = getattr(reference, "weights", {})
    assert sum(w.numel() for w in own.values()) <= sum(p.numel() for p in model.parameters() if p.requires_grad)
    reference.logps(PreferenceCollator(0, "padded")(ROWS))
    assert storages(model) == before
    assert not {w.untyped_storage().data_ptr() for w in own.values()} & before


def test_it_is_the_model_as_it_is_in_memory(tiny_llama):
    """Not that on the disk: scaled, resized, with an adapter merged."""
    model = trained_lora(tiny_llama).merge_and_unload()
    model.resize_token_embeddings(410)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.3)
    batch = PreferenceCollator(0, "padded")([{**ROWS[0], "chosen_ids": [405, 2]}])
    assert torch.equal(reference_for(model).logps(batch), logps(model, batch).logps)


def test_a_moving_one_has_weights_of_its_own(tiny_llama):
    model = get_peft_model(tiny_llama, LoraConfig(task_type="CAUSAL_LM"))
    reference = reference_for(model, moving=True)
    before = reference.logps(BATCH)
    for weight in reference.weights.values():
        weight += 0.1
    assert not torch.equal(reference.logps(BATCH), before)


def test_without_a_copy_it_is_the_model_itself(tiny_llama):
    assert type(reference_for(tiny_llama, copied=False)) is ModelNow


@pytest.mark.parametrize("shares", ["itself", "its trained weights"])
def test_a_reference_that_would_be_trained_is_refused(tiny_llama, shares):
    model = tiny_llama if shares == "itself" else get_peft_model(tiny_llama, LoraConfig(task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"ref_model (is the model itself|shares 8 trained weights with the model)"):
        reference_for(model, tiny_llama)


def test_precomputed_ones_are_read_or_refused():
    row = {**ROWS[0], "ref_chosen_logps": [-1.0, -2.0, -3.0], "ref_rejected_logps": [-4.0, -5.0]}
    found = Precomputed().logps(PreferenceCollator(0)([row]))
    assert found.tolist() == [[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]]
    with pytest.raises(ValueError, match="came without ref_chosen_logps"):
        Precomputed().logps(BATCH)


def test_the_fingerprint_is_of_all_that_matters(tiny_llama):
    base, copied = fingerprint(FrozenModel(tiny_llama)), copy.deepcopy(tiny_llama)
    copied.config._name_or_path = "elsewhere"
    assert fingerprint(ModelNow(copied)) == base
    copied.config.rms_norm_eps *= 10
    assert fingerprint(ModelNow(copied)) != base
    assert fingerprint(ModelNow(copy.deepcopy(tiny_llama).bfloat16())) != base
    tiny_llama.lm_head.weight.data[3, 3] += 1e-3
    assert fingerprint(FrozenModel(tiny_llama)) != base


def test_the_fingerprint_of_an_adapter(tiny_llama):
    """A fresh one, which is switched off, doesn't matter; a trained one does, as it was."""
    prints = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = get_peft_model(copy.deepcopy(tiny_llama), LoraConfig(task_type="CAUSAL_LM"))
        prints.append(fingerprint(reference_for(model)))
    assert prints[0] == prints[1]
    model = trained_lora(tiny_llama)
    reference = reference_for(model)
    before = fingerprint(reference)
    next(p for p in model.parameters() if p.requires_grad).data += 1
    assert fingerprint(reference) == before
    assert fingerprint(ModelNow(model)) != before
