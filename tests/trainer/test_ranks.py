"""Two processes do what one does: loss, metrics, token counts and weights, in training and in evaluation."""

import copy
import os
import socket

import pytest
import torch
import torch.multiprocessing
from datasets import Dataset

from strop import SFTConfig, SFTTrainer

TEXTS = [
    "the sky is blue",
    "ice",
    "a spider has eight legs and the sky is blue",
    "fire is hot",
    "water is wet and cold ice",
]
ROWS = Dataset.from_dict(
    {"prompt": TEXTS, "completion": [" " + " ".join(text.split()[: 1 + i]) for i, text in enumerate(TEXTS)]}
)


def run(model, tokenizer, folder, per_device: int, accumulate: int = 1, rows=ROWS, **options) -> dict:
    args = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        num_train_epochs=2,
        logging_steps=1,
        save_strategy="no",
        per_device_train_batch_size=per_device,
        per_device_eval_batch_size=per_device,
        gradient_accumulation_steps=accumulate,
        disable_tqdm=True,
        **options,
    )
    trainer = SFTTrainer(copy.deepcopy(model), args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    trainer.train()
    names = ("loss", "entropy", "mean_token_accuracy", "num_tokens")
    logs = [[log[name] for name in names] for log in trainer.state.log_history if "loss" in log]
    evaluation = trainer.evaluate()
    weights = {
        name: p.detach().clone() for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    }
    return {"logs": logs, "eval_loss": evaluation["eval_loss"], "weights": weights, "steps": trainer.state.global_step}


def rank(index: int, port: int, model, tokenizer, folder, options: dict) -> None:
    torch.set_num_threads(1)
    place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    torch.save(run(model, tokenizer, folder, **options), f"{folder}/rank{index}.pt")


def two_ranks(model, tokenizer, folder, **options) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        rank, args=(port, model, tokenizer, str(folder), options), nprocs=2, start_method="fork"
    )
    return [torch.load(folder / f"rank{index}.pt") for index in (0, 1)]


def assert_same(one: dict, other: dict):
    assert one["steps"] == other["steps"]
    torch.testing.assert_close(torch.tensor(one["logs"]), torch.tensor(other["logs"]), rtol=1e-5, atol=1e-6)
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(weight, other["weights"][name], rtol=1e-5, atol=1e-6, msg=name)


def test_two_ranks_are_one(tiny_llama, bpe_tokenizer, tmp_path):
    """Five rows in steps of four: the last step of an epoch has one row, so one rank has nothing to learn in it."""
    alone = run(tiny_llama, bpe_tokenizer, tmp_path, per_device=4)
    first, second = two_ranks(tiny_llama, bpe_tokenizer, tmp_path, per_device=2)
    assert_same(first, alone)
    assert_same(second, alone)


def test_two_ranks_with_accumulation_and_packing_are_one(tiny_llama, bpe_tokenizer, tmp_path):
    options = {"packing": True, "max_length": 32}
    alone = run(tiny_llama, bpe_tokenizer, tmp_path, per_device=4, **options)
    first, _ = two_ranks(tiny_llama, bpe_tokenizer, tmp_path, per_device=1, accumulate=2, **options)
    assert_same(first, alone)
