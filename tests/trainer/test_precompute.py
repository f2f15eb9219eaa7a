"""Precomputed reference log-probabilities change nothing, cost no second model, and are never another reference's."""

import copy
import gc

import pytest
import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from strop.trainer.dpo import DPOConfig, DPOTrainer
from strop.trainer.precompute import ReferenceColumns

WORDS = ["blue", "hot", "cold", "wet", "red", "eight"]
PAIRS = Dataset.from_list(
    [
        {"prompt": f"What is {word}?", "chosen": f" The sky is {word}." * (1 + i % 3), "rejected": " Fire is cold." * i}
        for i, word in enumerate(WORDS, 1)
    ]
)


def build(model, tokenizer, folder, ref_model=None, rows=PAIRS, **options) -> DPOTrainer:
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "precompute_ref_log_probs": True,
        "disable_tqdm": True,
    }
    args = DPOConfig(**defaults | options)
    return DPOTrainer(
        copy.deepcopy(model), ref_model, args, train_dataset=rows, eval_dataset=PAIRS, processing_class=tokenizer
    )


def losses(trainer) -> list[float]:
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def other(model) -> LlamaForCausalLM:
    torch.manual_seed(7)
    return LlamaForCausalLM(model.config)


def trained_lora(model):
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))


def fresh_lora(model):
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))


@pytest.mark.parametrize("kind", ["whole", "given", "fresh LoRA", "trained LoRA"])
def test_a_run_is_the_same(tiny_llama, bpe_tokenizer, tmp_path, kind):
    """Shuffled; the random state after the constructor is the same too, and so is an evaluation afterwards."""
    given = other(tiny_llama) if kind == "given" else None
    wrap = {"fresh LoRA": fresh_lora, "trained LoRA": trained_lora}.get(kind, lambda model: model)
    model = wrap(tiny_llama)
    runs = []
    for precompute in (True, False):
        trainer = build(model, bpe_tokenizer, tmp_path, given, precompute_ref_log_probs=precompute)
        state = torch.get_rng_state()
        runs.append((losses(trainer), state, trainer.evaluate()["eval_loss"]))
    assert runs[0][0] == pytest.approx(runs[1][0], abs=1e-6)
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][2] == pytest.approx(runs[1][2], abs=1e-6)


def test_no_second_model_is_kept(tiny_llama, bpe_tokenizer, tmp_path):
    given = other(tiny_llama)
    trainer = build(tiny_llama, bpe_tokenizer, tmp_path, given)
    gc.collect()
    assert gc.get_referrers(given) == []
    assert trainer.train_dataset["ref_chosen_logps"]


def test_new_rows_are_compared_with_the_start_or_refused(tiny_llama, bpe_tokenizer, tmp_path):
    trainer = build(tiny_llama, bpe_tokenizer, tmp_path)
    assert trainer.evaluate(PAIRS.select([3]))["eval_rewards/margins"] == pytest.approx(0, abs=1e-6)
    trainer.train()
    with pytest.raises(ValueError, match="asked before training and is not in memory any more"):
        trainer.evaluate(PAIRS.select([3]))
    assert trainer.evaluate(trainer.train_dataset)["eval_rewards/margins"] != 0
    trainer = build(fresh_lora(tiny_llama), bpe_tokenizer, tmp_path)
    expected = build(fresh_lora(tiny_llama), bpe_tokenizer, tmp_path, precompute_ref_log_probs=False)
    trainer.train()
    expected.model.load_state_dict(trainer.model.state_dict())
    names = ("eval_loss", "eval_rewards/chosen")
    found, wanted = ([t.evaluate(PAIRS.select([3]))[name] for name in names] for t in (trainer, expected))
    assert found == pytest.approx(wanted, abs=1e-6)


def count_forwards(monkeypatch) -> list[int]:
    seen = []
    computed = ReferenceColumns._computed
    monkeypatch.setattr(ReferenceColumns, "_computed", lambda self, batch: seen.append(1) or computed(self, batch))
    return seen


def test_saved_columns_are_used_where_they_fit(tiny_llama, bpe_tokenizer, tmp_path, monkeypatch):
    """Also a part of them in another order; rows without columns are computed, here those to evaluate."""
    trainer = build(tiny_llama, bpe_tokenizer, tmp_path)
    trainer.train_dataset.save_to_disk(tmp_path / "rows")
    seen = count_forwards(monkeypatch)
    rows = load_from_disk(tmp_path / "rows").shuffle(seed=1).select(range(4))
    again = build(tiny_llama, bpe_tokenizer, tmp_path, rows=rows)
    assert len(seen) == 1  # a batch of eight holds all rows to evaluate
    assert again.train_dataset["ref_key"] == rows["ref_key"]


def altered_model(model, tokenizer):
    model.lm_head.weight.data[5] += 1
    return {}


def shorter_rows(model, tokenizer):
    return {"rows": lambda rows: rows.map(lambda row: {"chosen_ids": row["chosen_ids"][:2]})}


def without_keys(model, tokenizer):
    return {"rows": lambda rows: rows.remove_columns("ref_key")}


def another_precision(model, tokenizer):
    return {"bf16": True}


@pytest.mark.parametrize("change", [altered_model, shorter_rows, without_keys, another_precision])
def test_stale_columns_are_refused(tiny_llama, bpe_tokenizer, tmp_path, change):
    rows = build(tiny_llama, bpe_tokenizer, tmp_path).train_dataset
    options = change(tiny_llama, bpe_tokenizer)
    rows = options.pop("rows", lambda rows: rows)(rows)
    with pytest.raises(ValueError, match=r"Remove (the|its) columns ref_\*, and they are computed anew"):
        build(tiny_llama, bpe_tokenizer, tmp_path, rows=rows, **options)


def test_the_cache_is_found_again_and_only_then(tiny_llama, bpe_tokenizer, tmp_path, monkeypatch):
    """Rows from a disk: a second run asks nothing, one with shorter rows or another model everything."""
    PAIRS.save_to_disk(tmp_path / "pairs")
    rows = load_from_disk(tmp_path / "pairs")
    seen = count_forwards(monkeypatch)
    args = (bpe_tokenizer, tmp_path)

    def run(model, **options):
        seen.clear()
        trainer = build(model, *args, rows=rows, **options)
        return len(seen), [row[:] for row in trainer.train_dataset["ref_chosen_logps"]]

    first, second = run(tiny_llama), run(tiny_llama, learning_rate=1e-5)
    assert (first[0], second[0]) == (2, 1)  # rows to evaluate are in memory, and computed every time
    assert first[1] == second[1]
    assert run(tiny_llama, max_length=14)[0] == 2
    assert run(other(tiny_llama))[0] == 2


def test_streams_are_refused(tiny_llama, bpe_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="an IterableDataset is read only once"):
        build(tiny_llama, bpe_tokenizer, tmp_path, rows=PAIRS.to_iterable_dataset())


def test_a_collator_of_the_users_is_refused(tiny_llama, bpe_tokenizer, tmp_path):
    args = DPOConfig(str(tmp_path), use_cpu=True, precompute_ref_log_probs=True)
    with pytest.raises(ValueError, match="a data_collator of your own need not heed"):
        DPOTrainer(tiny_llama, None, args, lambda rows: {}, train_dataset=PAIRS, processing_class=bpe_tokenizer)


def test_fewer_rows_than_ranks(monkeypatch):
    """Each rank has a row to ask about, and a row is there once."""
    rows = Dataset.from_dict({"prompt_ids": [[1]], "chosen_ids": [[2, 3]], "rejected_ids": [[4]]})
    monkeypatch.setattr("strop.trainer.precompute.gather_object", lambda own: own * 2)
    for index in (0, 1):
        scores = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
        columns = ReferenceColumns(lambda _, scores=scores: scores, "model", ("chosen", "rejected"), 4, 2, index)
        found = columns(rows, "eval")
        assert (found["ref_chosen_logps"][:], found["ref_rejected_logps"][:]) == ([[-1.0, -2.0]], [[-3.0]])
