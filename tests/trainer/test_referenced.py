"""Which reference a run has, and how it moves: in memory, layout and precision as the policy's own."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from strop import BEMACallback
from strop.models.reference import AdapterOff, FrozenModel, FrozenWeights
from strop.trainer.dpo import DPOConfig, DPOTrainer
from strop.trainer.referenced import refuse_second_model_of_shards

PAIRS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green."},
        {"prompt": "Is ice hot?", "chosen": " No.", "rejected": " Ice is hot and fire is cold."},
        {"prompt": "Is fire cold?", "chosen": " Fire is hot.", "rejected": " Yes."},
    ]
)
LORA = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])


def build(model, tokenizer, folder, ref_model=None, peft_config=None, callbacks=None, **options) -> DPOTrainer:
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 3,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return DPOTrainer(
        model,
        ref_model,
        DPOConfig(**defaults | options),
        train_dataset=PAIRS,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=callbacks,
    )


def losses(trainer) -> list[float]:
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def other(model) -> LlamaForCausalLM:
    torch.manual_seed(7)
    return LlamaForCausalLM(model.config)


def trained_adapter(model, name="default"):
    config = copy.deepcopy(LORA)
    config.init_lora_weights = False
    return get_peft_model(model, config, adapter_name=name)


KINDS = {
    "whole": (lambda model: model, {}, FrozenModel),
    "fresh adapter": (lambda model: model, {"peft_config": LORA}, AdapterOff),
    "trained adapter": (trained_adapter, {}, FrozenWeights),
    "trained adapter of a name": (lambda model: trained_adapter(model, "mine"), {}, FrozenWeights),
}


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"layout": "padded"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_at_ln_2(tiny_llama, bpe_tokenizer, tmp_path, kind, options):
    wrap, more, reference = KINDS[kind]
    trainer = build(wrap(tiny_llama), bpe_tokenizer, tmp_path, **more, **options)
    assert type(trainer.reference) is reference
    first, second = losses(trainer)
    assert first == pytest.approx(math.log(2), abs=1e-6)
    assert second < first
    assert trainer.state.log_history[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)


def test_a_frozen_adapter_is_not_in_checkpoints(tiny_llama, bpe_tokenizer, tmp_path):
    trainer = build(trained_adapter(tiny_llama), bpe_tokenizer, tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    files = {path.relative_to(tmp_path / "checkpoint-2").as_posix() for path in (tmp_path / "checkpoint-2").rglob("*")}
    assert {file for file in files if "adapter" in file} == {"adapter_config.json", "adapter_model.safetensors"}
    assert not {file for file in files if "ref" in file}


@pytest.mark.parametrize("peft_config", [None, LORA])
def test_a_given_reference_is_the_one(tiny_llama, bpe_tokenizer, tmp_path, peft_config):
    given = other(tiny_llama)
    first = losses(build(copy.deepcopy(tiny_llama), bpe_tokenizer, tmp_path, given, peft_config))[0]
    given.save_pretrained(tmp_path / "ref")
    by_name = losses(build(tiny_llama, bpe_tokenizer, tmp_path, str(tmp_path / "ref"), peft_config))[0]
    assert first == by_name
    assert abs(first - math.log(2)) > 1e-3


def test_a_reference_by_name_has_the_policys_dtype(tiny_llama, bpe_tokenizer, tmp_path):
    tiny_llama.save_pretrained(tmp_path / "ref")
    trainer = build(tiny_llama.bfloat16(), bpe_tokenizer, tmp_path, str(tmp_path / "ref"))
    assert trainer.reference.model.dtype == torch.bfloat16
    assert trainer.evaluate(PAIRS)["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_a_reference_that_cannot_be_packed_pads_both(tiny_llama, bpe_tokenizer, tmp_path):
    bloom = BloomForCausalLM(BloomConfig(vocab_size=400, hidden_size=32, n_layer=1, n_head=2))
    trainer = build(tiny_llama, bpe_tokenizer, tmp_path, bloom)
    assert trainer.data_collator.layout == "padded"
    assert math.isfinite(losses(trainer)[0])
    with pytest.raises(ValueError, match="padding_free=True can't be had for BloomForCausalLM"):
        build(tiny_llama, bpe_tokenizer, tmp_path, bloom, padding_free=True)


def test_a_reference_that_packs_wrongly_pads_both(tiny_llama, bpe_tokenizer, tmp_path, caplog):
    """It is found out on the first batch, as for the policy."""
    given = other(tiny_llama)
    forward = given.model.forward
    given.model.forward = lambda *a, **k: forward(*a, **{**k, "position_ids": None})
    packed = losses(build(copy.deepcopy(tiny_llama), bpe_tokenizer, tmp_path, given))
    assert "so this run pads its rows" in caplog.text
    assert packed == pytest.approx(losses(build(tiny_llama, bpe_tokenizer, tmp_path, given, layout="padded")))


def test_a_reference_of_a_smaller_vocabulary_is_refused(tiny_llama, bpe_tokenizer, tmp_path):
    small = LlamaForCausalLM(LlamaConfig(**{**tiny_llama.config.to_dict(), "vocab_size": 300}))
    with pytest.raises(ValueError, match="300"):
        build(tiny_llama, bpe_tokenizer, tmp_path, small)


@pytest.mark.parametrize("peft_config", [None, LORA])
def test_the_reference_follows_the_policy(tiny_llama, bpe_tokenizer, tmp_path, peft_config):
    """After the first of two steps: 0.6 of the policy and 0.4 of the start, adapters paired by name."""
    options = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6, "max_steps": 1}
    trainer = build(tiny_llama, bpe_tokenizer, tmp_path, None, peft_config, **options)
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in trained.items()}
    assert math.isclose(losses(trainer)[0], math.log(2), abs_tol=1e-6)
    moved = trainer.reference.weights
    assert any(not torch.equal(moved[name], start[name]) for name in trained)
    for name, policy in trained.items():
        torch.testing.assert_close(moved[name], 0.6 * policy.detach() + 0.4 * start[name])


def test_a_run_resumes_with_the_moving_reference_of_its_checkpoint(tiny_llama, bpe_tokenizer, tmp_path):
    """Whatever the adapter that it is given began with."""
    options = {"sync_ref_model": True, "ref_model_sync_steps": 1, "save_strategy": "steps", "save_steps": 1}
    weights = []
    for resume in (None, str(tmp_path / "checkpoint-1")):
        model = get_peft_model(copy.deepcopy(tiny_llama), LORA)  # its A drawn anew
        trainer = build(model, bpe_tokenizer, tmp_path, **options)
        trainer.train(resume_from_checkpoint=resume)
        weights.append({"policy": model.state_dict(), "reference": trainer.reference.weights})
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("given", [True, False])
def test_a_second_model_of_shards_is_refused(tiny_llama, given, monkeypatch):
    """And not the model without its new adapter."""
    monkeypatch.setattr("transformers.integrations.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="ZeRO-3 leaves each process a part"):
        refuse_second_model_of_shards(tiny_llama, other(tiny_llama) if given else None)
    refuse_second_model_of_shards(get_peft_model(tiny_llama, LORA), None)


def test_a_given_reference_follows_an_adapter_only_if_it_has_one(tiny_llama, bpe_tokenizer, tmp_path):
    options = {"sync_ref_model": True, "ref_model_sync_steps": 1}
    adapted = get_peft_model(other(tiny_llama), LORA)
    assert losses(build(copy.deepcopy(tiny_llama), bpe_tokenizer, tmp_path, adapted, LORA, **options))
    with pytest.raises(ValueError, match="the reference can't follow the policy"):
        build(tiny_llama, bpe_tokenizer, tmp_path, other(tiny_llama), LORA, **options).train()


@pytest.mark.parametrize("peft_config", [None, LORA])
def test_the_reference_becomes_an_average(tiny_llama, bpe_tokenizer, tmp_path, peft_config):
    average = BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=2)
    trainer = build(tiny_llama, bpe_tokenizer, tmp_path, None, peft_config, [average])
    trainer.train()
    assert average.bema
    for name, weight in average.bema.items():
        assert torch.equal(trainer.reference.weights[name], weight)


@pytest.mark.parametrize("options", [{"sync_ref_model": True}, {"precompute_ref_log_probs": True}], ids=str)
def test_a_reference_moves_in_one_way(tiny_llama, bpe_tokenizer, tmp_path, options):
    average = BEMACallback(update_ref_model=True)
    with pytest.raises(ValueError, match="keep one of them"):
        build(tiny_llama, bpe_tokenizer, tmp_path, callbacks=[average], **options)


def test_a_quantised_policy_has_a_reference_and_learns(tiny_folder, bpe_tokenizer, tmp_path):
    pytest.importorskip("bitsandbytes")
    trainer = build(
        str(tiny_folder),
        bpe_tokenizer,
        tmp_path / "run",
        peft_config=LORA,
        model_init_kwargs={"quantization_config": {"load_in_4bit": True}},
        max_steps=3,
    )
    assert isinstance(trainer.reference, AdapterOff)
    values = losses(trainer)
    assert values[0] == pytest.approx(math.log(2), abs=1e-6)
    assert values[2] < values[1] < values[0]


def test_gpt2_like_positions_do_not_depend_on_padding(bpe_tokenizer, tmp_path):
    """Absolute positions: log-probabilities of a row are those of the row alone, however the batch is padded."""
    model = AutoModelForCausalLM.from_config(_gpt2())
    trainer = build(model, bpe_tokenizer, tmp_path)
    whole = trainer.evaluate(PAIRS)
    alone = [trainer.evaluate(PAIRS.select([i])) for i in range(len(PAIRS))]
    for name in ("eval_logps/chosen", "eval_logps/rejected"):
        assert whole[name] == pytest.approx(sum(metrics[name] for metrics in alone) / len(PAIRS), rel=1e-5)


def _gpt2():
    from transformers import GPT2Config

    return GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=2)
