"""Values: of the state before each token, whatever the layout; a child that the policy's own life doesn't notice."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
)

from strop.models.forward import forward, use_packed_attention
from strop.models.logps import logps
from strop.models.values import (
    add_value_head,
    add_value_model,
    critic_of,
    load_critic,
    logps_and_values,
    own_trunk,
    save_critic,
    values,
    without_critic,
)
from strop.rollout.buffer import Experience
from strop.rollout.collate import RolloutCollator

KINDS = ("shared", "separate")
ROWS = [
    Experience([5, 6, 7, 8, 9, 10], 2, [0, 0, 1, 1, 0, 1]),
    Experience([5, 6, 11], 2, [0, 0, 1]),
    Experience([20, 21, 22, 23], 3, [0, 0, 0, 1]),
]


@pytest.fixture(params=KINDS)
def model(request, tiny_llama):
    return with_critic(tiny_llama.double(), request.param)


def with_critic(model, kind):
    if kind == "shared":
        add_value_head(model)
    else:
        add_value_model(model, own_trunk(model))
    for name, parameter in critic_of(model)[1].named_parameters():  # a new head says 0
        if kind == "shared" or name.startswith("score"):
            torch.nn.init.normal_(parameter)
    return model


def batch_of(rows, layout="padded"):
    return RolloutCollator(0, layout)(rows)


def test_the_value_of_the_state_before_each_token(model):
    batch = batch_of(ROWS)
    found = logps_and_values(model, batch)[1]
    name, critic = critic_of(model)
    for row, one in zip(found, ROWS, strict=True):
        ids = torch.tensor([one.token_ids])
        trunk, head = (model.model, critic) if name == "value_head" else (critic.model, critic.score)
        every = head(trunk(ids).last_hidden_state)[0, :, 0]
        own = torch.tensor(one.completion_mask[one.prompt_length :]).bool()
        before = every[one.prompt_length - 1 : -1]
        torch.testing.assert_close(row[: len(own)][own], before[own])
        assert (row[len(own) :] == 0).all()
        assert (row[: len(own)][~own] == 0).all()


def test_packed_is_padded_and_alone(model):
    padded = logps_and_values(model, batch_of(ROWS))[1]
    use_packed_attention(model)
    use_packed_attention(critic_of(model)[1]) if critic_of(model)[0] == "value_model" else None
    torch.testing.assert_close(logps_and_values(model, batch_of(ROWS, "packed"))[1], padded)
    for row, one in zip(padded, ROWS, strict=True):
        alone = logps_and_values(model, batch_of([one], "packed"))[1][0]
        torch.testing.assert_close(alone, row[: len(alone)])


def test_log_probabilities_are_as_without(model):
    batch = batch_of(ROWS)
    scores, found = logps_and_values(model, batch, temperature=0.7, entropy=True)
    with without_critic(model):
        alone = logps(model, batch, temperature=0.7, entropy=True)
    assert torch.equal(scores.logps, alone.logps)
    assert torch.equal(scores.entropy, alone.entropy)
    torch.testing.assert_close(values(model, batch), found)


def test_what_values_train(model):
    name, _ = critic_of(model)
    for detached in (False, True):
        model.zero_grad()
        logps_and_values(model, batch_of(ROWS), detached=detached)[1].sum().backward()
        trained = {key for key, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        assert any(key.startswith(name) for key in trained)
        touches_policy = any(not key.startswith(name) for key in trained)
        assert touches_policy == (name == "value_head" and not detached)


def test_one_gradient_with_and_without_checkpointing(model):
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model.zero_grad()
        logps_and_values(model, batch_of(ROWS))[1].sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_the_policy_alone_is_what_it_was(model, tmp_path):
    name, critic = critic_of(model)
    with without_critic(model):
        assert not any(name in key for key in model.state_dict())
        model.save_pretrained(tmp_path)
    assert critic_of(model) == (name, critic)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_saved_and_loaded(model, tmp_path):
    batch = batch_of(ROWS)
    before = values(model, batch)
    save_critic(model, tmp_path)
    for parameter in critic_of(model)[1].parameters():
        torch.nn.init.normal_(parameter)
    assert not torch.equal(values(model, batch), before)
    load_critic(model, tmp_path)
    assert torch.equal(values(model, batch), before)
    with pytest.raises(ValueError, match=r"there is no .*value_.* so the value function can't go on"):
        load_critic(model, tmp_path / "elsewhere")


def test_a_trunk_of_its_own_is_a_copy_without_adapters(tiny_llama):
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    plain, batch = copy.deepcopy(tiny_llama), batch_of(ROWS)
    adapted = get_peft_model(tiny_llama, config)
    critic = own_trunk(adapted)
    assert not any("lora" in name for name, _ in critic.named_parameters())
    for name, weight in plain.model.named_parameters():
        own = critic.model.get_parameter(name)
        assert torch.equal(own, weight)
        assert own.data_ptr() != weight.data_ptr()
    add_value_model(adapted, critic)
    assert all(parameter.requires_grad for parameter in critic.parameters())
    assert (values(adapted, batch) == 0).all()
    assert any("lora" in name for name, _ in adapted.named_parameters())


def test_models_without_one_number_are_refused(tiny_llama):
    two = AutoModelForSequenceClassification.from_config(tiny_llama.config)
    with pytest.raises(ValueError, match="num_labels=2"):
        add_value_model(tiny_llama, two)
    with pytest.raises(ValueError, match="has no value function"):
        critic_of(tiny_llama)
    with pytest.raises(ValueError, match="no classification head"):
        add_value_model(tiny_llama, copy.deepcopy(tiny_llama))


def test_what_cannot_say_values_is_refused(tiny_llama):
    config = BertConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_labels=1
    )
    encoder = AutoModelForTokenClassification.from_config(config)
    with pytest.raises(ValueError, match="its values would know what comes later"):
        add_value_model(tiny_llama, encoder)
    critic = own_trunk(tiny_llama)
    critic.hf_quantizer = tiny_llama.hf_quantizer = object()
    with pytest.raises(ValueError, match="is quantised, so its weights can't be trained"):
        add_value_model(tiny_llama, critic)
    with pytest.raises(ValueError, match="the policy is quantised, so a copy of its trunk can't be trained"):
        own_trunk(tiny_llama)


def test_in_16_bit_values_are_float32(tiny_llama):
    model = with_critic(tiny_llama.to(torch.bfloat16), "shared")
    found = logps_and_values(model, batch_of(ROWS))[1]
    assert found.dtype is torch.float32
    assert found.any()
    assert forward(model, batch_of(ROWS)).logits.dtype is torch.bfloat16
