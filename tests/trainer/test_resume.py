"""A run killed at any moment continues bit for bit: weights and log equal those of the run that was left alone."""

import copy
import multiprocessing
import os
import signal

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from strop import SFTConfig, SFTTrainer
from strop.runs import checkpoint

STEPS = 7
TEXTS = [
    f"{word} the sky is {word} and the water is {word * (i % 5)}"
    for i, word in enumerate(["blue", "hot", "cold", "wet"] * 6)
]


class KillAt(TrainerCallback):
    """kill -9 at the end of a step, after its log and before nothing."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def data(kind: str):
    rows = Dataset.from_dict({"text": TEXTS})
    return rows.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=7) if kind == "streaming" else rows


def run(model, tokenizer, folder, kind, resume=None, callbacks=()):
    options = {"packing": True, "max_length": 48} if kind in ("packing", "streaming") else {}
    args = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        save_steps=2,
        logging_steps=3,  # saves fall into the middle of a log's window
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_total_limit=2,
        disable_tqdm=True,
        **options,
    )
    torch.manual_seed(1)
    trainer = SFTTrainer(
        copy.deepcopy(model), args, train_dataset=data(kind), processing_class=tokenizer, callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def killed_run(*args, **kwargs) -> int:
    """Exit code of `run` in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=run, args=args, kwargs=kwargs)
    process.start()
    process.join(120)
    return process.exitcode


def log(trainer) -> list[dict]:
    timing = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    return [{k: v for k, v in entry.items() if k not in timing} for entry in trainer.state.log_history]


@pytest.fixture
def dropping_llama(tiny_llama):
    tiny_llama.config.attention_dropout = 0.2  # random numbers are drawn at every step
    for layer in tiny_llama.model.layers:
        layer.self_attn.attention_dropout = 0.2
    return tiny_llama


@pytest.mark.parametrize("kind", ["shuffled", "packing", "streaming"])
def test_killed_and_resumed_equals_uninterrupted(dropping_llama, bpe_tokenizer, tmp_path, kind):
    whole = run(dropping_llama, bpe_tokenizer, tmp_path / "whole", kind)
    assert killed_run(dropping_llama, bpe_tokenizer, tmp_path / "cut", kind, callbacks=[KillAt(5)]) == -signal.SIGKILL
    resumed = run(dropping_llama, bpe_tokenizer, tmp_path / "cut", kind, resume=True)
    assert resumed._initial_global_step == 4
    assert log(resumed) == log(whole)
    for (name, a), b in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_resuming_every_step_changes_nothing(dropping_llama, bpe_tokenizer, tmp_path):
    whole = run(dropping_llama, bpe_tokenizer, tmp_path / "whole", "shuffled")
    assert killed_run(dropping_llama, bpe_tokenizer, tmp_path / "cut", "shuffled", callbacks=[KillAt(3)]) < 0
    assert (
        killed_run(dropping_llama, bpe_tokenizer, tmp_path / "cut", "shuffled", resume=True, callbacks=[KillAt(6)]) < 0
    )
    resumed = run(dropping_llama, bpe_tokenizer, tmp_path / "cut", "shuffled", resume=True)
    assert log(resumed) == log(whole)
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_killed_while_saving_leaves_the_last_whole_checkpoint(dropping_llama, bpe_tokenizer, tmp_path, monkeypatch):
    publish = checkpoint.publish

    def die_at_the_second(output_dir, name):
        if name == "checkpoint-4":
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(output_dir, name)

    monkeypatch.setattr(checkpoint, "publish", die_at_the_second)
    assert killed_run(dropping_llama, bpe_tokenizer, tmp_path, "shuffled") == -signal.SIGKILL
    monkeypatch.undo()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = run(dropping_llama, bpe_tokenizer, tmp_path, "shuffled", resume=True)
    assert resumed._initial_global_step == 2
    assert not checkpoint.staging_folder(tmp_path).exists() or not list(checkpoint.staging_folder(tmp_path).iterdir())


def test_a_finished_run_says_so(tiny_llama, bpe_tokenizer, tmp_path, caplog):
    run(tiny_llama, bpe_tokenizer, tmp_path, "shuffled")
    run(tiny_llama, bpe_tokenizer, tmp_path, "shuffled", resume=True)
    assert f"already at step {STEPS} of {STEPS}" in caplog.text


def test_the_best_checkpoint_is_named_by_its_final_place(tiny_llama, bpe_tokenizer, tmp_path):
    rows = Dataset.from_dict({"text": TEXTS})
    args = SFTConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_steps=2,
        save_steps=1,
        eval_steps=1,
        eval_strategy="steps",
        load_best_model_at_end=True,
        learning_rate=1e-2,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(tiny_llama, args, train_dataset=rows, eval_dataset=rows, processing_class=bpe_tokenizer)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert str(tmp_path / "checkpoint-2") in (tmp_path / "checkpoint-2" / "trainer_state.json").read_text()
