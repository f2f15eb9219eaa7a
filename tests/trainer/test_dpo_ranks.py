"""Two processes do what one does, in training, with a loss of the whole step, and in evaluation."""

import copy
import os
import socket

import pytest
import torch
import torch.multiprocessing
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from strop import DPOConfig, DPOTrainer

PAIRS = Dataset.from_list(
    [
        {"prompt": f"What is {word}?", "chosen": " The sky is" + f" {word}" * (1 + i % 3), "rejected": " Ice." * i}
        for i, word in enumerate(["blue", "hot", "cold", "wet", "red"], 1)
    ]
)
CASES = {
    "aot and sft": {"loss_type": ["aot", "sft"]},
    "adapter, precomputed": {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 2},
}


def run(model, tokenizer, folder, case: str, per_device: int, accumulate: int = 1) -> dict:
    args = DPOConfig(
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
        **CASES[case],
    )
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    if "adapter" in case:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    trainer = DPOTrainer(model, args=args, train_dataset=PAIRS, eval_dataset=PAIRS, processing_class=tokenizer)
    trainer.train()
    skipped = {"learning_rate", "epoch", "step"}
    logs = [{k: v for k, v in log.items() if k not in skipped} for log in trainer.state.log_history if "loss" in log]
    evaluation = {k: v for k, v in trainer.evaluate().items() if "_per_second" not in k and "runtime" not in k}
    trained = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    weights = {name: p.detach().clone() for name, p in trained if p.requires_grad}
    return {
        "logs": logs,
        "evaluation": evaluation,
        "weights": weights,
        "rewards": trainer.predict(trainer.eval_dataset).predictions,
    }


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
    return [torch.load(folder / f"rank{index}.pt", weights_only=False) for index in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one(tiny_llama, bpe_tokenizer, tmp_path, case):
    """Five pairs in steps of four: the last step of an epoch has one, so one rank has nothing to learn in it."""
    alone = run(tiny_llama, bpe_tokenizer, tmp_path, case, per_device=4)
    cut = {"per_device": 1, "accumulate": 2} if case == "aot and sft" else {"per_device": 2}
    for other in two_ranks(tiny_llama, bpe_tokenizer, tmp_path, case=case, **cut):
        for ours, theirs in zip(other["logs"], alone["logs"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
        assert other["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-4, abs=1e-5)
        torch.testing.assert_close(other["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
        assert other["rewards"] == pytest.approx(alone["rewards"], rel=1e-4, abs=1e-5)
