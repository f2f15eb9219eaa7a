"""Runs of a few steps under plain SGD, on one process or on two, to be compared."""

import copy
import dataclasses
import os
import random
import re
import socket

import pytest
import torch
import torch.multiprocessing
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from strop.data.collate import keep_examples
from strop.losses.reduce import StepCounts
from strop.rollout.types import Completion

DEFAULTS = {
    "use_cpu": True,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}
NOT_COMPARED = {"epoch", "step", "learning_rate", "num_tokens"}


class Run:
    """What a finished trainer has to show."""

    def __init__(self, trainer):
        self.trainer = trainer

    @property
    def logs(self) -> list[dict[str, float]]:
        """The metrics of each step."""
        history = [log for log in self.trainer.state.log_history if "loss" in log]
        return [{name: value for name, value in log.items() if name not in NOT_COMPARED} for log in history]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def evaluate(self, *args, **options) -> dict[str, float]:
        """What `evaluate` measures, without times."""
        found = self.trainer.evaluate(*args, **options)
        return {name: value for name, value in found.items() if not re.search("time|second|epoch", name)}

    def assert_same(self, other, rtol=1e-4, atol=1e-5):
        assert_close_logs(self.logs, other.logs, rtol, atol)
        for name, weight in self.weights.items():
            torch.testing.assert_close(weight, other.weights[name], rtol=rtol, atol=atol, msg=name)


def assert_close_logs(ours, theirs, rtol=1e-4, atol=1e-5):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=rtol, abs=atol), name


@pytest.fixture
def train(tiny_llama, bpe_tokenizer, tmp_path):
    """`train(trainer_class, rows, model=..., trainer_options=..., **config)` gives the `Run` of a copy of the model."""

    def run(trainer_class, rows, model=None, trainer_options=None, resume=None, **config) -> Run:
        args = trainer_class.config_class(**DEFAULTS | {"output_dir": str(tmp_path / "run")} | config)
        options = {"processing_class": bpe_tokenizer} | (trainer_options or {})
        model = copy.deepcopy(tiny_llama if model is None else model)
        trainer = trainer_class(model, args=args, train_dataset=rows, **options)
        if args.max_steps > 0:
            trainer.train(resume_from_checkpoint=resume)
        return Run(trainer)

    return run


CUTS = (
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
    {"layout": "padded", "activation_checkpointing": False},
)


@pytest.fixture
def assert_cuts_change_nothing(train):
    """A step on four rows is the same in micro-batches, padded, and without checkpointing; gives the whole one."""

    def check(trainer_class, rows, *others, **common):
        common = {"max_steps": 1, "learning_rate": 1.0} | common
        whole = train(trainer_class, rows, **common)
        for options in (*CUTS, *others):
            train(trainer_class, rows, **common | options).assert_same(whole, rtol=1e-5)
        return whole

    return check


def gradient(trainer, batches) -> dict[str, torch.Tensor]:
    """That of a step of these micro-batches."""
    trainer.model.zero_grad()
    trainer.look_ahead(batches)
    trainer.model.train()
    counts = sum((trainer.count(batch) for batch in batches), StepCounts(0, 0))
    for batch in batches:
        trainer.loss(trainer.model, batch, counts)[0].backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.fixture
def assert_one_gradient():
    """Four rows of a trainer have one gradient, and not 0, packed or padded, in micro-batches or with fillers, with and
    without checkpointing, of whole weights and of an adapter's."""

    def check(trainer):
        compare(trainer)
        own, wrapped = trainer.model, trainer.model_wrapped
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
        trainer.model = trainer.model_wrapped = get_peft_model(copy.deepcopy(own), config)
        compare(trainer)
        trainer.model, trainer.model_wrapped = own, wrapped

    def compare(trainer):
        rows = [trainer.train_dataset[i] for i in range(4)]
        padded = dataclasses.replace(trainer.data_collator, layout="padded")
        packed = trainer.data_collator
        whole = gradient(trainer, [packed(rows)])
        largest = max(g.abs().max().item() for g in whole.values())
        assert largest > 1e-3
        cuts = (
            [padded(rows)],
            [packed(rows[:1]), packed(rows[1:])],
            [padded(rows[:2]), padded(rows[2:])],
            [packed(rows[:3]), keep_examples(packed(rows[3:] + rows[:2]), 1), keep_examples(packed(rows[:1]), 0)],
        )
        found = [gradient(trainer, batches) for batches in cuts]
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        assert trainer.model.is_gradient_checkpointing
        found += [gradient(trainer, batches) for batches in ([packed(rows)], cuts[2])]
        trainer.model.gradient_checkpointing_disable()
        for one in found:
            for name, value in one.items():
                torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-5 * largest, msg=name)

    return check


@pytest.fixture
def on_two_ranks(tmp_path):
    """`on_two_ranks(function)` gives what `function()` returns in each of two processes that know each other."""

    def run(function) -> list:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = (port, function, str(tmp_path))
        torch.multiprocessing.start_processes(_rank, args=arguments, nprocs=2, start_method="fork")
        return [torch.load(tmp_path / f"rank{index}.pt") for index in (0, 1)]

    return run


def _rank(index: int, port: int, function, folder: str) -> None:
    torch.set_num_threads(1)
    place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    torch.save(function(), f"{folder}/rank{index}.pt")


# Trainers on rollouts


class Scripted:
    """Writes 1 to `max_tokens` tokens that follow from the row's number alone, with log-probabilities of `logp`."""

    def __init__(self, logp: float = -3.0, vocab_size: int = 300):
        self.logp, self.vocab_size = logp, vocab_size
        self.asked: list[tuple[int, ...]] = []
        self.numbers: list[int] = []

    def generate(self, prompts, sampling, *, rows=None, max_tokens=None):
        self.asked += [tuple(prompt) for prompt in prompts]
        self.numbers += rows
        return [self.completion(number, sampling.max_tokens) for number in rows]

    def completion(self, number: int, max_tokens: int) -> Completion:
        dice = random.Random(number)
        length = dice.randint(1, max_tokens)
        ids = [dice.randrange(5, self.vocab_size) for _ in range(length)]
        return Completion(ids, [self.logp] * length, "length" if length == max_tokens else "stop")

    def sync(self, model):
        pass


def vowels(completions, **_):
    """Deterministic, and different for most completions."""
    return [sum(map(text.count, "aeiou")) + len(text) / 7 for text in completions]


@pytest.fixture
def prompts() -> Dataset:
    words = ["blue", "hot", "cold", "wet", "red"]
    return Dataset.from_list([{"prompt": f"What is {word}?", "word": word} for word in words])


@pytest.fixture
def make_rollout_trainer(tiny_llama, bpe_tokenizer, prompts, tmp_path):
    """`make(trainer_class, **config)`: a trainer of a copy of the model, on a scripted generator or, with
    `generator=None`, the model's own."""

    def make(trainer_class, generator="scripted", rows=None, rewards=vowels, model=None, more=None, **config):
        own = {"max_completion_length": 6, "num_generations": 2, "output_dir": str(tmp_path / "run")}
        return trainer_class(
            model=copy.deepcopy(tiny_llama if model is None else model),
            reward_funcs=rewards,
            args=trainer_class.config_class(**DEFAULTS | own | config),
            train_dataset=prompts if rows is None else rows,
            processing_class=bpe_tokenizer,
            generator=Scripted() if generator == "scripted" else generator,
            **more or {},
        )

    return make
