"""Adapters: what is trained, in which precision, with which new tokens; what a ready one keeps; what is refused."""

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from strop.models.adapters import apply_peft, base_model, is_peft, load_adapter, trainable_summary
from strop.models.arguments import ModelInitArguments
from strop.models.load import load_model

IDS = torch.arange(12)[None]


def lora(**options):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"]} | options)


def trainable(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def train(model: nn.Module, ids: torch.Tensor, steps: int, lr: float) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_only_the_adapter_is_trainable(tiny_llama):
    model = apply_peft(tiny_llama, lora())
    assert is_peft(model)
    assert base_model(model) is tiny_llama
    assert len(trainable(model)) == 2 * 2 * 2  # layers x modules x (A, B)
    assert all(".lora_" in name for name in trainable(model))


def test_the_callers_config_stays_as_it_was(tiny_llama):
    config = lora()
    before = dict(config.__dict__)
    apply_peft(tiny_llama, config, [3])
    assert config.__dict__ == before


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapter_is_float32_over_a_bfloat16_base_and_moves(tiny_llama, use_dora):
    """A magnitude near 1 has bfloat16 neighbours 2^-8 apart: ten steps of 1e-4 would each be rounded away."""
    model = apply_peft(tiny_llama.to(torch.bfloat16), lora(use_dora=use_dora))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = torch.optim.Adam(parameters.values(), 1e-4)
    for _ in range(10):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all((parameters[name] != before[name]).any() for name in before)


def test_lora_on_the_head(tiny_llama):
    model = apply_peft(tiny_llama, lora(target_modules=["q_proj", "lm_head"]))
    assert any("lm_head" in name for name in trainable(model))


# the task


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_task_is_filled_in(tiny_llama, task):
    assert apply_peft(tiny_llama, lora(task_type=task)).peft_config["default"].task_type == "CAUSAL_LM"


def test_wrong_task_is_refused(tiny_llama):
    with pytest.raises(ValueError, match=r"'SEQ_CLS', but the model is a LlamaForCausalLM.*task_type='CAUSAL_LM'"):
        apply_peft(tiny_llama, lora(task_type="SEQ_CLS"))


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_a_reward_models_head_is_trained_with_the_adapter(task):
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    model = apply_peft(LlamaForSequenceClassification(config), lora(task_type=task))
    assert model.peft_config["default"].task_type == "SEQ_CLS"
    assert any(name.endswith("score.modules_to_save.default.weight") for name in trainable(model))
    with pytest.raises(ValueError, match=r"'TOKEN_CLS', but the model is a LlamaForSequenceClassification"):
        apply_peft(LlamaForSequenceClassification(config), lora(task_type="TOKEN_CLS"))


@pytest.mark.parametrize(
    ("model_class", "parts"),
    [(BertForSequenceClassification, ["pooler", "classifier"]), (BertForTokenClassification, ["classifier"])],
)
def test_all_between_an_encoders_states_and_its_labels_is_trained_and_saved(model_class, parts, tmp_path):
    config = BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    base = model_class(config)
    known = {name: weight.clone() for name, weight in base.bert.state_dict().items() if "pooler" not in name}
    model = apply_peft(base, lora(target_modules=["query"]))
    names = {name.split(".modules_to_save.")[0].split(".")[-1] for name in trainable(model) if "lora" not in name}
    assert names == set(parts)
    model.save_pretrained(tmp_path)
    other = model_class(config)  # whose new layers are drawn anew
    other.bert.load_state_dict(known, strict=False)
    again = PeftModel.from_pretrained(other, tmp_path)
    ids = torch.arange(5, 12)[None]
    torch.testing.assert_close(again.eval()(ids).logits, model.eval()(ids).logits)


# a ready adapter


def test_a_ready_adapter_keeps_exactly_its_trainable_parameters(tiny_llama):
    model = get_peft_model(tiny_llama, lora(modules_to_save=["lm_head"]))
    for name, parameter in model.named_parameters():
        if "layers.0" in name:
            parameter.requires_grad_(False)
    before = trainable(model)
    assert apply_peft(model, None) is model
    assert trainable(model) == before


def test_a_frozen_adapter_is_refused(tmp_path, tiny_llama):
    get_peft_model(tiny_llama, lora()).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(tiny_llama.config), tmp_path)
    with pytest.raises(ValueError, match="is_trainable=True"):
        apply_peft(model, None)


def test_a_frozen_model_is_refused(tiny_llama):
    with pytest.raises(ValueError, match=r"all are frozen.*peft_config"):
        apply_peft(tiny_llama.requires_grad_(False), None)


def test_a_second_adapter_is_refused(tiny_llama):
    with pytest.raises(ValueError, match=r"already has the adapter 'default'.*merge_and_unload"):
        apply_peft(get_peft_model(tiny_llama, lora()), lora())


def test_what_is_no_config_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="peft_config is a dict, not a PeftConfig"):
        apply_peft(tiny_llama, {"r": 8})


# new tokens


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_learn_and_survive_saving(tmp_path, tiny_folder, tied):
    """Tokens 400 and 401 are new. Their rows move, all others stay, and the reloaded adapter computes the same."""
    config = LlamaConfig.from_pretrained(tiny_folder, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tiny_folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model.resize_token_embeddings(402)
    model = apply_peft(model, lora(), [400, 401])
    ids = torch.tensor([[5, 400, 6, 401, 7, 400, 8]])
    old = model.get_input_embeddings().weight.detach().clone()
    train(model, ids, 3, 1.0)
    new = model.get_input_embeddings()(torch.arange(402))
    moved = (new != old).any(-1)
    assert moved[400:].all()
    assert not moved[:400].any()
    model.save_pretrained(tmp_path / "adapter")
    reloaded = load_adapter(str(tmp_path / "adapter"), lambda path: AutoModelForCausalLM.from_pretrained(path))
    torch.testing.assert_close(reloaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-6)
    assert trainable(reloaded) == trainable(model)


def test_an_untied_head_learns_new_tokens_too(tiny_llama):
    model = apply_peft(tiny_llama, lora(), [7])
    assert [n for n in trainable(model) if "trainable_tokens" in n and "lm_head" in n]
    assert model.peft_config["default"].trainable_token_indices == {"embed_tokens": [7], "lm_head": [7]}


def test_new_tokens_join_those_asked_for(tiny_llama):
    model = apply_peft(tiny_llama, lora(trainable_token_indices=[3]), [7])
    assert model.peft_config["default"].trainable_token_indices == {"embed_tokens": [3, 7], "lm_head": [7]}


def test_a_fully_trained_embedding_needs_no_rows(tiny_llama):
    model = apply_peft(tiny_llama, lora(modules_to_save=["embed_tokens", "lm_head"]), [7])
    assert model.peft_config["default"].trainable_token_indices is None


@pytest.mark.parametrize("config", [IA3Config(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")])
def test_an_adapter_that_cant_learn_new_tokens_is_refused(tiny_llama, config):
    with pytest.raises(ValueError, match=f"1 tokens are new.*{type(config).__name__} can't train"):
        apply_peft(tiny_llama, config, [7])


def test_new_tokens_after_the_adapter_are_refused_unless_it_knows_them(tiny_llama):
    model = apply_peft(tiny_llama, lora(), [7, 8])
    assert apply_peft(model, None, [7, 8]) is model
    with pytest.raises(ValueError, match=r"1 tokens are new.*Add the tokens to the base model first"):
        apply_peft(model, None, [8, 9])


# loading and telling


def test_an_adapters_folder_loads_with_its_base_and_trains_on(tmp_path, tiny_folder):
    model = apply_peft(AutoModelForCausalLM.from_pretrained(tiny_folder), lora())
    train(model, IDS, 2, 0.5)
    model.save_pretrained(tmp_path / "adapter")
    loaded = load_model(str(tmp_path / "adapter"), ModelInitArguments())
    assert trainable(loaded) == trainable(model)
    torch.testing.assert_close(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=1e-6)


def test_summary_counts(tiny_llama):
    """LoRA on q (32 -> 32) and v (32 -> 16) of two layers, rank 4: 2 x (4 x 64 + 4 x 48) = 896.

    Base: embedding and head 2 x 400 x 32, two layers of q, o 2 x 32 x 32, k, v 2 x 16 x 32, MLP 3 x 64 x 32, norms 64,
    and a last norm of 32: 25,600 + 2 x 9,280 + 32 = 44,192.
    """
    assert trainable_summary(apply_peft(tiny_llama, lora())) == "trains 896 of 45,088 parameters (1.99 %)"
