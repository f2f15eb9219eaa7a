"""Which layout a model is given, and what its forward pass receives."""

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM

import strop.models.attention
from strop.data.collate import TokenRow, collate
from strop.models.forward import (
    base_model,
    choose_layout,
    forward,
    packing_obstacle,
    refuse_beyond_positions,
    use_packed_attention,
)
from strop.models.segments import Segments

SIZE = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "pad_token_id": 0}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "num_attention_heads": 2}
WINDOW |= {"num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1, "layer_types": ["sliding_attention"]}

ROWS = [TokenRow([1, 2, 3], None), TokenRow([4, 5], [4, 5], 0), TokenRow([6], [6], 0), TokenRow([7, 8], [7, 8])]


def llama(**changes) -> LlamaForCausalLM:
    config = {"intermediate_size": 16, "num_attention_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**SIZE, **config, **changes)).eval()


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("mamba", {"state_size": 4}, "carries a state from token to token"),
        ("t5", {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}, "an encoder and a decoder"),
        ("bloom", {"n_head": 2}, "doesn't attend through transformers' AttentionInterface"),
        ("lfm2", {"num_attention_heads": 2, "num_key_value_heads": 2, "layer_types": ["conv"]}, "layers of type conv"),
        ("qwen2_moe", WINDOW, "keeps its sliding window in its mask"),
        ("bert", {"intermediate_size": 16, "num_attention_heads": 2, "is_decoder": False}, "attends to later tokens"),
    ],
)
def test_models_that_cannot_be_packed_say_why(family, config, reason):
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(family, **(SIZE | config)))
    layout, why = choose_layout(model)
    assert layout == "padded"
    assert reason in why
    assert type(model).__name__ in why
    with pytest.raises(ValueError, match="Use the padded layout"):
        use_packed_attention(model)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt2", {"num_attention_heads": 2, "n_positions": 12}),
        ("opt", {"num_attention_heads": 2, "ffn_dim": 16, "max_position_embeddings": 12, "word_embed_proj_dim": 16}),
        ("bert", {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 12}),
        ("roberta", {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 13}),
        ("llama", {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 12}),
    ],
)
def test_rows_beyond_learned_positions_are_refused_and_no_others(family, config):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZE | config)))
    refuse_beyond_positions(model, 12, "train")
    model(torch.arange(2, 14)[None])
    if family == "llama":  # whose positions are computed
        refuse_beyond_positions(model, 13, "train")
        return
    with pytest.raises(ValueError, match=r"train: rows have up to 13 tokens.*has learned 12 positions.*max_length=12"):
        refuse_beyond_positions(model, 13, "train")
    with pytest.raises((RuntimeError, IndexError)):
        model(torch.arange(2, 15)[None])


def test_a_model_on_the_attention_interface_is_packed():
    model = llama()
    assert choose_layout(model) == ("packed", "LlamaForCausalLM attends through transformers' AttentionInterface")


def test_a_module_of_no_transformers_model_is_padded():
    assert packing_obstacle(nn.Linear(2, 2)) == "Linear is no transformers model"


@pytest.mark.parametrize("adapter", [PromptTuningConfig, PrefixTuningConfig])
def test_adapters_with_virtual_tokens_are_padded(adapter):
    model = get_peft_model(llama(), adapter(task_type="CAUSAL_LM", num_virtual_tokens=2))
    layout, why = choose_layout(model)
    assert layout == "padded"
    assert "virtual tokens" in why


def test_activated_lora_is_padded():
    config = LoraConfig(r=1, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    assert "activated LoRA" in choose_layout(get_peft_model(llama(), config))[1]


def wrapped(model):
    return {
        "lora": lambda: get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"], task_type="CAUSAL_LM")),
        "untyped lora": lambda: get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"])),
        "data parallel": lambda: nn.DataParallel(model),
    }


@pytest.mark.parametrize("wrapper", ["lora", "untyped lora", "data parallel"])
def test_wrapped_models_are_prepared_and_called_alike(wrapper):
    """No wrapper changes the numbers: a new LoRA adapter adds 0."""
    batch, plain = collate(ROWS, "packed", 0), llama()
    use_packed_attention(plain)
    expected = forward(plain, batch).logits
    plain.set_attn_implementation("sdpa")
    model = wrapped(plain)[wrapper]()
    assert base_model(model) is plain
    use_packed_attention(model)
    torch.testing.assert_close(forward(model, batch).logits, expected, rtol=1e-5, atol=1e-6)


def test_base_model_of_a_compiled_adapter():
    model = llama()
    adapter = wrapped(model)["lora"]()
    assert base_model(torch.compile(adapter, backend="eager")) is model


def test_preparing_twice_changes_nothing():
    model = llama()
    use_packed_attention(model)
    config = model.config.to_dict()
    use_packed_attention(model)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "strop"


def test_the_choice_is_not_saved_with_the_model(tmp_path):
    """A saved model must load where strop is not installed."""
    model = llama()
    use_packed_attention(model)
    model.save_pretrained(tmp_path)
    assert "strop" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_forward_reads_what_a_model_reads_and_nothing_else(layout):
    class Spy(nn.Module):
        def forward(self, **kwargs):
            return kwargs

    batch = collate(ROWS, layout, 0) | {"model_kwargs": {"pixel_values": 1}, "advantages": 2}
    reads = {"packed": {"position_ids", "segments"}, "padded": {"attention_mask"}}[layout]
    received = forward(Spy(), batch, output_hidden_states=True)
    assert set(received) == reads | {"input_ids", "pixel_values", "use_cache", "output_hidden_states"}
    assert received["use_cache"] is False


def test_no_mask_is_built_for_a_packed_batch_and_one_for_a_padded(monkeypatch):
    """transformers would recognise the restarting positions and build an N x N mask."""
    built = []
    sdpa_mask = strop.models.attention.sdpa_mask
    monkeypatch.setattr("strop.models.attention.sdpa_mask", lambda *a, **k: built.append(k) or sdpa_mask(*a, **k))
    model = llama()
    use_packed_attention(model)
    forward(model, collate(ROWS, "packed", 0))
    assert len(built) == 0
    forward(model, collate(ROWS, "padded", 0))
    assert len(built) == 1


def test_an_error_within_leaves_masks_as_they_were():
    model = llama()
    use_packed_attention(model)
    padded, packed = collate(ROWS, "padded", 0), collate(ROWS, "packed", 0)
    expected = forward(model, padded).logits
    with pytest.raises(ValueError, match=r"1 x 8 tokens but segments for 1 x 7"):
        forward(model, packed | {"segments": Segments((7,), (-1,))})
    assert torch.equal(forward(model, padded).logits, expected)


def test_attention_that_is_not_causal_refuses_segments():
    model = llama()
    use_packed_attention(model)
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(ValueError, match="LlamaAttention has attention that is not causal"):
        forward(model, collate(ROWS, "packed", 0))


def test_dropout_of_attention_is_honoured():
    """Training mode with dropout 0.5 changes the output from call to call; evaluation doesn't."""
    model = llama(attention_dropout=0.5)
    use_packed_attention(model)
    batch = collate(ROWS, "packed", 0)
    assert torch.equal(forward(model, batch).logits, forward(model, batch).logits)
    model.train()
    assert not torch.equal(forward(model, batch).logits, forward(model, batch).logits)
