"""Models of other kinds: what can't be packed is padded and says so, experts, adapters, quantised weights."""

import logging

import pytest
import torch
from datasets import Dataset
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from strop import SFTConfig, SFTTrainer

ROWS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "completion": " The sky is blue."},
        {"prompt": "Is ice hot?", "completion": " Ice is cold."},
        {"prompt": "How many legs has a spider?", "completion": " Eight."},
    ]
)


def train(model, tokenizer, tmp_path, trainer_options=None, **options) -> SFTTrainer:
    defaults = {"max_steps": 12, "per_device_train_batch_size": 3, "logging_steps": 1, "learning_rate": 1e-2}
    args = SFTConfig(
        str(tmp_path),
        use_cpu=True,
        save_strategy="no",
        lr_scheduler_type="constant",
        disable_tqdm=True,
        **defaults | options,
    )
    trainer = SFTTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer, **trainer_options or {})
    trainer.train()
    return trainer


@pytest.fixture
def sharp_llama(tiny_llama):
    """A model whose frozen head can express confidence, so that adapters below it can learn."""
    with torch.no_grad():
        tiny_llama.lm_head.weight.mul_(20)
    return tiny_llama


def losses(trainer) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def assert_learns(trainer):
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0]


def test_a_state_space_model_gets_padded_rows_and_says_so(bpe_tokenizer, tmp_path, caplog):
    caplog.set_level(logging.INFO, "strop")
    config = MambaConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0, eos_token_id=2
    )
    trainer = train(MambaForCausalLM(config), bpe_tokenizer, tmp_path, activation_checkpointing=False)
    assert trainer.data_collator.layout == "padded"
    assert "layout: padded (MambaForCausalLM" in caplog.text
    assert_learns(trainer)


def test_an_encoder_decoder_reads_the_prompt_and_learns_the_rest(bpe_tokenizer, tmp_path):
    sizes = {"vocab_size": 400, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0))
    total, count = 0.0, 0
    for row in ROWS:
        answer = [*bpe_tokenizer(row["completion"]).input_ids, bpe_tokenizer.eos_token_id]
        alone = model(**bpe_tokenizer(row["prompt"], return_tensors="pt"), labels=torch.tensor([answer]))
        total, count = total + alone.loss.item() * len(answer), count + len(answer)
    trainer = train(model, bpe_tokenizer, tmp_path)
    assert losses(trainer)[0] == pytest.approx(total / count, rel=1e-5)
    assert_learns(trainer)


def test_padding_free_is_refused_where_it_can_not_be_had(bpe_tokenizer, tmp_path):
    model = MambaForCausalLM(MambaConfig(vocab_size=400, hidden_size=32, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="padding_free=True can't be had for MambaForCausalLM"):
        train(model, bpe_tokenizer, tmp_path, padding_free=True)


def test_balancing_loss_of_experts_is_added_and_logged(bpe_tokenizer, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = MixtralForCausalLM(
        MixtralConfig(vocab_size=400, num_key_value_heads=2, num_local_experts=4, pad_token_id=0, **sizes)
    )
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    results = {}
    for coef in (0.0, 0.5):
        model.load_state_dict(weights)
        trainer = train(model, bpe_tokenizer, tmp_path, max_steps=1, router_aux_loss_coef=coef)
        results[coef] = next(log for log in trainer.state.log_history if "loss" in log)
    assert "aux_loss" not in results[0.0]
    assert results[0.5]["loss"] == pytest.approx(results[0.0]["loss"] + 0.5 * results[0.5]["aux_loss"], rel=1e-5)


def test_experts_are_asked_of_models_that_have_them(tiny_llama, bpe_tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.1, but LlamaForCausalLM has no experts"):
        train(tiny_llama, bpe_tokenizer, tmp_path, router_aux_loss_coef=0.1)


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "lm_head"]], ids=str)
def test_lora_trains_the_adapter_alone_and_loads_again(sharp_llama, bpe_tokenizer, tmp_path, target):
    from peft import LoraConfig, PeftModel

    start = {name: value.clone() for name, value in sharp_llama.state_dict().items()}
    peft_config = LoraConfig(r=4, target_modules=target, task_type="CAUSAL_LM")
    trainer = train(sharp_llama, bpe_tokenizer, tmp_path, {"peft_config": peft_config}, max_steps=25)
    assert_learns(trainer)
    trainer.save_model()
    again = type(sharp_llama)(sharp_llama.config)
    again.load_state_dict(start)
    loaded = PeftModel.from_pretrained(again, tmp_path).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits)


def test_neftune_adds_noise_in_training_only(tiny_llama, bpe_tokenizer, tmp_path):
    weights = {name: value.clone() for name, value in tiny_llama.state_dict().items()}
    runs = []
    for alpha in (None, 5.0):
        tiny_llama.load_state_dict(weights)
        trainer = train(tiny_llama, bpe_tokenizer, tmp_path, max_steps=1, learning_rate=0.0, neftune_noise_alpha=alpha)
        runs.append((losses(trainer)[0], trainer.evaluate(ROWS)["eval_loss"]))
    assert runs[0][0] != pytest.approx(runs[1][0], abs=1e-5)
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_base_with_an_adapter(sharp_llama, bpe_tokenizer, tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    options = {
        "quantization_config": BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8),
        "peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    }
    sharp_llama.save_pretrained(tmp_path / "base")
    trainer = train(str(tmp_path / "base"), bpe_tokenizer, tmp_path / "out", options, max_steps=25)
    before = trainer.evaluate(ROWS)["eval_loss"]  # a forward pass without gradients, then more training
    trainer.train()
    assert_learns(trainer)
    assert trainer.evaluate(ROWS)["eval_loss"] < before
