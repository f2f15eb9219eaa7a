"""Quantised bases: adapters on them keep learning after an evaluation, and nothing else is trained."""

import sys

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from strop.models.adapters import apply_peft, trainable_summary
from strop.models.arguments import ModelInitArguments
from strop.models.load import describe_precision, load_model
from strop.models.quantize import as_quantization_config, is_quantized, keep_cpu_layers_differentiable

IDS = torch.arange(3, 30)[None]
CONFIGS = {
    "4-bit nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "4-bit fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "8-bit": {"load_in_8bit": True},
}


@pytest.fixture
def folder(tmp_path):
    """Layers of 64: what bitsandbytes re-packs for a CPU has at least that many inputs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    pytest.importorskip("bitsandbytes")
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return str(tmp_path)


def quantised(folder, name):
    return load_model(folder, ModelInitArguments(), BitsAndBytesConfig(**CONFIGS[name]))


def gradients(model) -> dict[str, torch.Tensor]:
    model.train()
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def forward_in_evaluation(model) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=IDS)


def adapter(model):
    """LoRA whose B isn't zero, so that A has a gradient too."""
    model = apply_peft(model, LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_after_an_evaluation_is_the_one_before(folder, name):
    model = adapter(quantised(folder, name))
    before = gradients(model)
    forward_in_evaluation(model)
    after = gradients(model)
    assert before.keys() == after.keys()
    assert len(before) == 2 * 7 * 2  # layers x linear modules x (A, B)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(grad.abs().max() > 0 for grad in before.values())


def test_gradient_is_that_of_the_unpacked_weights(folder):
    """The same adapter on the dequantised base, in float32."""
    model = adapter(quantised(folder, "4-bit nf4"))
    plain = adapter(load_model(folder, ModelInitArguments()))
    import bitsandbytes as bnb

    for (_, mine), (_, theirs) in zip(model.named_modules(), plain.named_modules(), strict=True):
        if isinstance(mine, bnb.nn.Linear4bit):
            unpacked = bnb.functional.dequantize_4bit(mine.weight.data, mine.weight.quant_state)
            theirs.weight.data.copy_(unpacked)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "lora_" in k}, strict=False)
    mine, theirs = gradients(model), gradients(plain)
    for key, grad in mine.items():
        torch.testing.assert_close(grad, theirs[key], rtol=1e-4, atol=1e-6)


def test_weights_packed_before_are_unpacked(folder):
    """A model that generated before it came to us has packed layers, on a CPU that has the kernel for it."""
    model = quantised(folder, "4-bit nf4")
    reference = {name: p.data.clone() for name, p in model.named_parameters()}
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = has_kernel()
    forward_in_evaluation(model)
    keep_cpu_layers_differentiable(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.data.view(-1), reference[name].view(-1))
        assert not getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False)


def has_kernel() -> bool:
    from bitsandbytes.functional import has_avx512bf16

    return has_avx512bf16()


@pytest.mark.parametrize("name", CONFIGS)
def test_only_the_adapter_is_trainable_and_the_line_says_so(folder, name):
    from types import SimpleNamespace

    model = quantised(folder, name)
    assert is_quantized(model)
    assert not any(p.requires_grad for p in model.parameters())
    model = adapter(model)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    run = SimpleNamespace(bf16=False, fp16=False, optim="adamw_torch", device="cpu")
    expected = f"weights {name}, autocast off, optimizer state float32, device cpu"
    assert describe_precision(model, run) == expected


def test_summary_counts_4_bit_weights_as_weights(folder):
    """Base 2 x 64 x 64 + 2 x (4 x 64^2 + 3 x 64 x 128 + 2 x 64) + 64 = 90,432; LoRA at rank 4 on all linear layers:
    2 x 4 x (4 x 128 + 3 x 192) = 8,704."""
    assert trainable_summary(adapter(quantised(folder, "4-bit nf4"))) == "trains 8,704 of 99,136 parameters (8.78 %)"


def test_a_quantised_model_without_adapter_is_refused(folder):
    with pytest.raises(ValueError, match=r"none of the model's weights is trainable \(8-bit\).*peft_config"):
        apply_peft(quantised(folder, "8-bit"), None)


# settings


def test_settings_may_be_a_dict():
    config = as_quantization_config({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    assert (config.load_in_4bit, config.bnb_4bit_quant_type) == (True, "nf4")
    assert as_quantization_config(None) is None


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match=r"unknown option 'bnb_4bit_quant_typ'\. Did you mean 'bnb_4bit_quant_type'"):
        as_quantization_config({"load_in_4bit": True, "bnb_4bit_quant_typ": "nf4"})


def test_settings_that_quantise_nothing_are_refused():
    with pytest.raises(ValueError, match="quantises nothing"):
        as_quantization_config({"bnb_4bit_quant_type": "nf4"})


def test_without_bitsandbytes_the_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"pip install strop\[quantization\]"):
        as_quantization_config({"load_in_8bit": True})
