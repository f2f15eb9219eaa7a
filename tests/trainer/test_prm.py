"""A process reward model learns which steps are good, judged at the last token of what separates them."""

import copy
import json
import logging
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, LlamaConfig, LlamaForTokenClassification

from strop.rewards.reward_model import score_steps
from strop.trainer.prm import PRMConfig, PRMTrainer

GOLDENS = Path(__file__).parents[1] / "goldens"
STEPS = json.loads((GOLDENS / "reward_runs.json").read_text())["steps"]
ROWS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "completions": ["The sky is wet.", "So it is blue."], "labels": [False, True]},
        {"prompt": "Is ice hot?", "completions": ["Ice is cold."], "labels": [True]},
        {"prompt": "Is fire cold?", "completions": ["Fire is red.", "No.", "Yes."], "labels": [True, True, False]},
    ]
)
METRICS = ("loss", "grad_norm", "accuracy")


@pytest.fixture
def judge(tiny_llama):
    """The tiny Llama with a head of two classes that tells steps apart clearly."""
    model = LlamaForTokenClassification(LlamaConfig(**tiny_llama.config.to_dict() | {"num_labels": 2}))
    model.model.load_state_dict(tiny_llama.model.state_dict())
    torch.nn.init.normal_(model.score.weight, std=0.2, generator=torch.Generator().manual_seed(1))
    return model


def config(folder, **options) -> PRMConfig:
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "per_device_train_batch_size": 3,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return PRMConfig(**defaults | options)


def trainer_of(model, tokenizer, folder, trainer_options=None, **options) -> PRMTrainer:
    return PRMTrainer(
        copy.deepcopy(model),
        config(folder, **options),
        train_dataset=ROWS,
        processing_class=tokenizer,
        **trainer_options or {},
    )


def train(*args, **kwargs) -> PRMTrainer:
    trainer = trainer_of(*args, **kwargs)
    trainer.train()
    return trainer


def test_rows_are_trls(judge, tmp_path):
    """At 10 tokens no step is judged any more, which strop refuses; TRL trains on nothing."""
    tokenizer = AutoTokenizer.from_pretrained(GOLDENS / "tiny_llama")
    rows = Dataset.from_list([STEPS["example"]])
    for case in STEPS["cases"]:
        options = {k: v for k, v in case["kw"].items() if k != "is_eval"}
        kinds = {"eval_dataset" if case["kw"]["is_eval"] else "train_dataset": rows}
        if options["max_length"] == 10:
            with pytest.raises(ValueError, match="has a token to train within max_length=10"):
                PRMTrainer(copy.deepcopy(judge), config(tmp_path, **options), processing_class=tokenizer, **kinds)
            continue
        trainer = PRMTrainer(copy.deepcopy(judge), config(tmp_path, **options), processing_class=tokenizer, **kinds)
        (row,) = getattr(trainer, *kinds)
        assert {name: row[name] for name in ("input_ids", "labels")} == case["out"]


def test_the_loss_is_the_mean_over_steps(judge, bpe_tokenizer, tmp_path):
    """-log p(label) of each of the six steps, from the probabilities that `score` gives; as much each, whatever row."""
    trainer = trainer_of(judge, bpe_tokenizer, tmp_path)
    good = trainer.score(ROWS["prompt"], ROWS["completions"])
    with pytest.raises(ValueError, match="no list of texts; write each step as one"):
        trainer.score(["x"], ["one step"])
    assert [len(steps) for steps in good] == [2, 1, 3]
    pairs = [(p.item(), y) for row, labels in zip(good, ROWS["labels"], strict=True) for p, y in zip(row, labels)]  # noqa: B905
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(-sum(math.log(p if y else 1 - p) for p, y in pairs) / 6, rel=1e-5)
    assert log["accuracy"] == pytest.approx(sum((p > 0.5) == y for p, y in pairs) / 6)
    again = score_steps(trainer.model, bpe_tokenizer, ROWS["prompt"], ROWS["completions"], batch_size=1)
    torch.testing.assert_close(torch.cat(again), torch.cat(trainer.score(ROWS["prompt"], ROWS["completions"])))


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "padded"},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "activation_checkpointing": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("adapter", [False, True])
def test_how_a_step_is_computed_changes_nothing(judge, bpe_tokenizer, tmp_path, options, adapter):
    lora = {"peft_config": LoraConfig(r=4, task_type="CAUSAL_LM")} if adapter else {}
    one = train(judge, bpe_tokenizer, tmp_path, lora)
    other = train(judge, bpe_tokenizer, tmp_path, lora, **options)
    logs = [[[log[name] for name in METRICS] for log in t.state.log_history if "loss" in log] for t in (one, other)]
    torch.testing.assert_close(*map(torch.tensor, logs), rtol=1e-5, atol=1e-6)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if adapter:
        assert any("score.modules_to_save" in name for name, p in one.model.named_parameters() if p.requires_grad)


def test_rows_that_see_each_other_are_found(judge, bpe_tokenizer, tmp_path, monkeypatch, caplog):
    """The layouts are compared by the states that steps are judged at; a mixing model gets padded rows."""
    from strop.models import attention
    from strop.models.segments import Segments

    whole = trainer_of(judge, bpe_tokenizer, tmp_path, layout="padded").evaluate(ROWS)["eval_loss"]
    pieces = attention.attend_in_pieces
    monkeypatch.setattr(
        attention,
        "attend_in_pieces",
        lambda q, k, v, s, scores: pieces(q, k, v, Segments((s.num_tokens,), (-1,)), scores),
    )
    trainer = trainer_of(judge, bpe_tokenizer, tmp_path)
    assert trainer.evaluate(ROWS)["eval_loss"] == pytest.approx(whole, rel=1e-5)
    assert "so this run pads its rows" in caplog.text


def test_evaluation_and_prediction(judge, bpe_tokenizer, tmp_path):
    def agreement(predictions):
        logits, labels = predictions
        judged = labels >= 0
        return {"share": float((logits.argmax(-1) == labels)[judged].mean()), "steps": int(judged.sum())}

    trainer = trainer_of(judge, bpe_tokenizer, tmp_path, {"eval_dataset": {"a": ROWS, "b": ROWS.select(range(1))}})
    found = trainer.evaluate()
    assert found["eval_a_loss"] == pytest.approx(trainer.evaluate(ROWS)["eval_loss"])
    options = {"compute_metrics": agreement}
    trainer = trainer_of(judge, bpe_tokenizer, tmp_path, options, per_device_eval_batch_size=2)
    metrics = trainer.evaluate(ROWS)
    assert metrics["eval_steps"] == 6
    assert metrics["eval_share"] == pytest.approx(metrics["eval_accuracy"]) == pytest.approx(found["eval_a_accuracy"])
    assert metrics["eval_loss"] == pytest.approx(found["eval_a_loss"], rel=1e-5)
    predicted = trainer.predict(ROWS)
    assert predicted.label_ids.tolist() == [[0, 1, -100], [1, -100, -100], [1, 1, 0]]


def test_a_language_model_learns_to_judge(tiny_folder, tmp_path, caplog):
    """Steps that say "blue" are good ones: all held-out steps are told apart after 20 steps of training."""
    caplog.set_level(logging.INFO, "strop")
    nouns = ["sky", "water", "ice", "fire", "spider", "legs", "cold", "wet"]
    rows = [
        {
            "prompt": "What?",
            "completions": [
                f"The {a} is {'blue' if i % 2 else 'green'}.",
                f"And the {b} is {'blue' if i % 3 else 'hot'}.",
            ],
            "labels": [bool(i % 2), bool(i % 3)],
        }
        for i, (a, b) in enumerate((a, b) for a in nouns for b in nouns)
    ]
    rows = Dataset.from_list(rows * 2).train_test_split(16, seed=0)
    args = config(
        tmp_path, optim="adamw_torch", learning_rate=3e-3, per_device_train_batch_size=8, max_steps=20, logging_steps=20
    )
    trainer = PRMTrainer(str(tiny_folder), args, train_dataset=rows["train"], eval_dataset=rows["test"])
    assert trainer.model.score.weight.shape == (2, 32)
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.95


def test_what_would_go_wrong_is_refused(judge, tiny_llama, bpe_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="has no classification head"):
        trainer_of(tiny_llama, bpe_tokenizer, tmp_path)
    judge.config.num_labels = 1
    with pytest.raises(ValueError, match=r"num_labels=1, but a step is good or bad\. Load it with num_labels=2"):
        trainer_of(judge, bpe_tokenizer, tmp_path)
    with pytest.raises(ValueError, match="router_aux_loss_coef"):
        config(tmp_path, router_aux_loss_coef=0.1)
