"""Runs of reward models on two processes and across a kill are the runs that nothing happened to."""

import copy
import multiprocessing
import os
import signal
import socket

import pytest
import torch
import torch.multiprocessing
from datasets import Dataset
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification, TrainerCallback

from strop import PRMConfig, PRMTrainer, RewardConfig, RewardTrainer

QUESTIONS = ["What is the sky?", "Is ice hot?", "How many legs has a spider?", "Is fire cold?", "Is water wet?"]
BLUE = " The sky is blue."
PAIRS = [{"prompt": q, "chosen": BLUE * (1 + i % 2), "rejected": " No."} for i, q in enumerate(QUESTIONS)]
ANSWERS = [" Blue.", " No.", " Ice and fire."]
RANKED = [{"prompt": q, "completions": ANSWERS[: 2 + i % 2]} for i, q in enumerate(QUESTIONS)]
STEPS = [
    {"prompt": q, "completions": ["The sky.", "Ice.", "Hot."][: 1 + i % 3], "labels": [True, False, True][: 1 + i % 3]}
    for i, q in enumerate(QUESTIONS)
]
KINDS = {
    "pairs": (RewardTrainer, RewardConfig, PAIRS),
    "ranked": (RewardTrainer, RewardConfig, RANKED),
    "steps": (PRMTrainer, PRMConfig, STEPS),
}


@pytest.fixture
def models(tiny_llama):
    found = {}
    for kind, cls in (("pairs", LlamaForSequenceClassification), ("steps", LlamaForTokenClassification)):
        torch.manual_seed(0)
        options = {"num_labels": 1 if kind == "pairs" else 2}
        found[kind] = cls(LlamaConfig(**tiny_llama.config.to_dict() | options))
    return found | {"ranked": found["pairs"]}


def run(model, tokenizer, folder, kind, per_device=2, resume=None, callbacks=(), **options):
    trainer_class, config_class, rows = KINDS[kind]
    args = config_class(
        output_dir=str(folder),
        use_cpu=True,
        lr_scheduler_type="constant",
        per_device_train_batch_size=per_device,
        per_device_eval_batch_size=per_device,
        disable_tqdm=True,
        **options,
    )
    torch.manual_seed(1)
    rows = Dataset.from_list(rows)
    trainer = trainer_class(
        copy.deepcopy(model), args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer,
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def measured(entry: dict) -> dict:
    return {k: v for k, v in entry.items() if not k.endswith(("runtime", "per_second", "total_flos"))}


def log(trainer) -> list[dict]:
    return [measured(entry) for entry in trainer.state.log_history]


# Ranks


def outcome(model, tokenizer, folder, kind, per_device) -> dict:
    trainer = run(
        model, tokenizer, folder, kind, per_device,
        optim="sgd", learning_rate=0.5, max_grad_norm=0, num_train_epochs=1, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    evaluation = measured(trainer.evaluate())
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {"log": log(trainer), "evaluation": evaluation, "weights": weights}


def rank(index: int, port: int, model, tokenizer, folder, kind) -> None:
    torch.set_num_threads(1)
    place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    torch.save(outcome(model, tokenizer, folder, kind, 2), f"{folder}/rank{index}.pt")


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_are_one(models, bpe_tokenizer, tmp_path, kind):
    """Five rows in steps of four: in the last step of an epoch one rank has nothing to learn."""
    model = models[kind]
    alone = outcome(model, bpe_tokenizer, tmp_path, kind, 4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        rank, args=(port, model, bpe_tokenizer, str(tmp_path), kind), nprocs=2, start_method="fork"
    )
    for index in (0, 1):
        found = torch.load(tmp_path / f"rank{index}.pt")
        for ours, theirs in zip(found["log"], alone["log"], strict=True):
            assert {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()} == ours
        assert {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in alone["evaluation"].items()} == found["evaluation"]
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=name)


# Resume


class KillAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["ranked", "steps"])
def test_killed_and_resumed_equals_uninterrupted(models, bpe_tokenizer, tmp_path, kind):
    """Log windows of three steps, so that extremes and sums cross the kill too; random numbers at every step."""
    options = {"max_steps": 5, "save_steps": 2, "logging_steps": 3, "learning_rate": 1e-2}
    model = models[kind]
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    whole = run(model, bpe_tokenizer, tmp_path / "whole", kind, **options)
    process = multiprocessing.get_context("fork").Process(
        target=run, args=(model, bpe_tokenizer, tmp_path / "cut", kind), kwargs={"callbacks": [KillAt()], **options}
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    resumed = run(model, bpe_tokenizer, tmp_path / "cut", kind, resume=True, **options)
    assert resumed._initial_global_step == 2
    assert log(resumed) == log(whole)
    for (name, a), b in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b), name
