"""What is measured: each case makes the same public calls on either library.

A case takes the library's module and the folder of a model, and returns a `Measured`. To add one, write a function and
give it a line in `CASES`.
"""

import functools
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import rows
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


@dataclass
class Measured:
    """What a run of a case took."""

    seconds: float
    """CPU time of this process, all threads, user and system: of the call, or the median of the optimizer steps."""
    wall: float
    rows: int | None = None
    """Rows that came out, as a check that both did the same."""
    losses: list[float] = field(default_factory=list)
    """The logged losses, one an optimizer step."""


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """The function's result, its CPU seconds and its wall seconds."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    result = function()
    return result, cpu_seconds() - cpu, time.perf_counter() - wall


class StepClock(TrainerCallback):
    """CPU and wall seconds of each optimizer step but the first, which warms up, and the losses logged.

    With `whole`, from the end of a step to the end of the next: what is done to get a step's batches counts, too.
    """

    def __init__(self, whole: bool = False):
        self.whole = whole
        self.begun = (0.0, 0.0)
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.whole:
            self.begun = cpu_seconds(), time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step > 1:
            self.cpu.append(cpu_seconds() - self.begun[0])
            self.wall.append(time.perf_counter() - self.begun[1])
        self.begun = cpu_seconds(), time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.losses.append(round(float(logs["loss"]), 5))


def pack(lib: ModuleType, model: str, strategy: str) -> Measured:
    """200,000 documents into rows of 2048 tokens."""
    documents = rows.documents(200_000)
    packed, cpu, wall = timed(lambda: lib.pack_dataset(documents, 2048, strategy))
    return Measured(cpu, wall, rows=len(packed))


def settings(folder: str, steps: int, **more: Any) -> dict[str, Any]:
    """Arguments of a training config: fp32 on the CPU, nothing saved or reported."""
    return {
        "output_dir": folder,
        "max_steps": steps,
        "logging_steps": 1,
        "learning_rate": 1e-5,
        "seed": 0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | more


def prepare(lib: ModuleType, model: str, data: Callable[[int], Dataset], **options: Any) -> Measured:
    """4,000 conversations to token ids and masks, which is what constructing a trainer does."""
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    raw = data(4_000)
    with tempfile.TemporaryDirectory() as folder:
        config = lib.SFTConfig(**settings(folder, 1, max_length=1024, **options))
        trainer, cpu, wall = timed(
            lambda: lib.SFTTrainer(model=loaded, args=config, train_dataset=raw, processing_class=tokenizer)
        )
    return Measured(cpu, wall, rows=len(trainer.train_dataset))


def sft(lib: ModuleType, model: str, num_rows: int, **options: Any) -> Measured:
    """Optimizer steps of supervised fine-tuning."""
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lib.SFTTrainer(
            model=model,
            args=lib.SFTConfig(**settings(folder, 6, **options)),
            train_dataset=rows.prompt_completion(num_rows),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[clock],
        )
        trainer.train()
    return Measured(statistics.median(clock.cpu), statistics.median(clock.wall), losses=clock.losses)


def preference(
    lib: ModuleType, model: str, kind: str, prompt: int, answer: int, batch_size: int = 4, **options: Any
) -> Measured:
    """Optimizer steps of DPO or of a reward model on pairs whose lengths are the same throughout."""
    clock, tokenizer = StepClock(), AutoTokenizer.from_pretrained(model)
    options = {"max_length": 1024, "per_device_train_batch_size": batch_size} | options
    with tempfile.TemporaryDirectory() as folder:
        trainer = getattr(lib, f"{kind}Trainer")(
            model=model,
            args=getattr(lib, f"{kind}Config")(**settings(folder, 5, **options)),
            train_dataset=rows.pairs(tokenizer, 8 * batch_size, prompt, answer),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    return Measured(statistics.median(clock.cpu), statistics.median(clock.wall), losses=clock.losses)


def grpo(lib: ModuleType, model: str, given: bool, **options: Any) -> Measured:
    """Whole optimizer steps of GRPO, or those on `given` completions of 64 random tokens to prompts of 384."""
    clock, tokenizer = StepClock(whole=True), AutoTokenizer.from_pretrained(model)
    common = {"per_device_train_batch_size": 8, "num_generations": 8, "beta": 0.0, "temperature": 1.0}

    def by_length(completions: list, **_: Any) -> list[float]:
        return [float(len(str(completion)) % 7) for completion in completions]

    def written(prompts: list[str], *_: Any) -> dict[str, Any]:
        dice = random.Random(1)
        ids = [[dice.randrange(100, 40_000) for _ in range(64)] for _ in prompts]
        return {"prompt_ids": tokenizer(prompts).input_ids, "completion_ids": ids, "logprobs": None}

    if given:
        data, more = rows.pairs(tokenizer, 32, 384, 64).select_columns("prompt"), {"rollout_func": written}
    else:
        data, more = rows.prompt_completion(32).select_columns("prompt"), {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = lib.GRPOTrainer(
            model=model,
            reward_funcs=by_length,
            args=lib.GRPOConfig(**settings(folder, 4, **common | options)),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[clock],
            **more,
        )
        trainer.train()
    return Measured(statistics.median(clock.cpu), statistics.median(clock.wall), losses=clock.losses)


CASES: dict[str, Callable[[ModuleType, str], Measured]] = {
    "pack_bfd": functools.partial(pack, strategy="bfd"),
    "pack_bfd_split": functools.partial(pack, strategy="bfd_split"),
    "pack_wrapped": functools.partial(pack, strategy="wrapped"),
    "prepare": functools.partial(prepare, data=rows.prompt_completion),
    "prepare_assistant": functools.partial(prepare, data=rows.messages, assistant_only_loss=True),
    "sft": functools.partial(sft, num_rows=200, per_device_train_batch_size=8, max_length=1024),
    "sft_packed": functools.partial(sft, num_rows=400, per_device_train_batch_size=1, max_length=2048, packing=True),
    "sft_long": functools.partial(sft, num_rows=400, per_device_train_batch_size=1, max_length=4096, packing=True),
    "dpo": functools.partial(preference, kind="DPO", prompt=384, answer=64),
    "dpo_short": functools.partial(preference, kind="DPO", prompt=16, answer=200),
    "reward": functools.partial(preference, kind="Reward", prompt=384, answer=64),
    "grpo": functools.partial(grpo, given=False, max_completion_length=48, gradient_accumulation_steps=4),
    "grpo_train": functools.partial(grpo, given=True, max_completion_length=64),
}
