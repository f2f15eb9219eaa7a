"""A DPO run killed at any moment continues bit for bit, its reference included."""

import copy
import multiprocessing
import os
import signal

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from strop import BEMACallback, DPOConfig, DPOTrainer

STEPS = 5
PAIRS = Dataset.from_list(
    [
        {"prompt": f"What is {word}?", "chosen": " The sky is" + f" {word}" * (1 + i % 3), "rejected": " Ice." * i}
        for i, word in enumerate(["blue", "hot", "cold", "wet", "red", "eight", "green"] * 2, 1)
    ]
)
KINDS = {
    "stream": {"loss_type": ["aot", "sft"]},
    "precomputed": {"precompute_ref_log_probs": True},
    "moving adapter": {"sync_ref_model": True, "ref_model_sync_steps": 1},
    "average": {},
}


class KillAt(TrainerCallback):
    """kill -9 at the end of a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run(model, tokenizer, folder, kind, resume=None, callbacks=()) -> DPOTrainer:
    args = DPOConfig(
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
        **KINDS[kind],
    )
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    if "adapter" in kind:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    callbacks = list(callbacks)
    if kind == "average":
        callbacks.insert(0, BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1))
    rows = PAIRS.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=5) if kind == "stream" else PAIRS
    trainer = DPOTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks)
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


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_equals_uninterrupted(tiny_llama, bpe_tokenizer, tmp_path, kind):
    whole = run(tiny_llama, bpe_tokenizer, tmp_path / "whole", kind)
    assert killed_run(tiny_llama, bpe_tokenizer, tmp_path / "cut", kind, callbacks=[KillAt(3)]) == -signal.SIGKILL
    resumed = run(tiny_llama, bpe_tokenizer, tmp_path / "cut", kind, resume=True)
    assert resumed._initial_global_step == 2
    assert log(resumed) == log(whole)
    for (name, a), b in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    ours, theirs = (getattr(trainer.reference, "weights", {}) for trainer in (resumed, whole))
    assert bool(ours) == (kind != "precomputed")
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def test_another_reference_is_refused(tiny_llama, bpe_tokenizer, tmp_path):
    """As when the checkpoint is given as the model, too: its trained weights would be their own reference."""
    trained = run(tiny_llama, bpe_tokenizer, tmp_path, "stream").model
    with pytest.raises(ValueError, match="the run resumes at step 5 with another reference than it began with"):
        run(trained, bpe_tokenizer, tmp_path, "stream", resume=True)
