"""One optimizer step of DPO gives TRL's numbers, from raw pairs to updated weights, packed and padded.

The goldens are TRL 1.16 on a 2-layer Llama in float32 with eager attention under SGD, then an evaluation. Not compared
is what differs on purpose: means over micro-batches of different size, ties, which count half here, and `num_tokens`,
which counts a shared prompt once. An adapter starts with other random numbers.
"""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop import DPOConfig, DPOTrainer

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = json.loads((GOLDENS / "dpo_runs.json").read_text())
UNWEIGHTED = {"dpo_ga2", "dpo_conv", "dpo_conv_implicit"}
"""Entropy and accuracy are averages over micro-batches."""


def run(case, tmp_path, **options):
    args = DPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        optim="sgd",
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        per_device_eval_batch_size=3,
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        **case["config"] | options,
    )
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(GOLDENS / "tiny_llama"),
        case["reference"] and AutoModelForCausalLM.from_pretrained(GOLDENS / case["reference"]),
        args,
        train_dataset=Dataset.from_list(case["dataset"]),
        eval_dataset=Dataset.from_list(case["dataset"]),
        processing_class=AutoTokenizer.from_pretrained(GOLDENS / "tiny_llama"),
        peft_config=LoraConfig(task_type="CAUSAL_LM") if case["adapter"] else None,
    )
    trainer.train()
    return trainer


PADDED_TOO = ("dpo", "dpo_conv", "dpo_max_length5", "dpo_peft_with_ref")
RUNS = [(case, "packed") for case in CASES] + [(case, "padded") for case in CASES if case["name"] in PADDED_TOO]


@pytest.mark.parametrize(("case", "layout"), RUNS, ids=[f"{case['name']} {layout}" for case, layout in RUNS])
def test_a_step_equals_trl(case, layout, tmp_path):
    trainer = run(case, tmp_path, layout=layout)
    for column, values in case["prepared"].items():
        if column.endswith("_logps"):
            sums = [sum(logps) for logps in trainer.train_dataset[column]]
            assert sums == pytest.approx(values, rel=1e-5), column
        else:
            assert trainer.train_dataset[column] == values, column
    skipped = {"entropy", "mean_token_accuracy"} if case["name"] in UNWEIGHTED else set()
    skipped |= {"rewards/accuracies"} if case["log"]["rewards/margins"] == 0 else set()
    skipped |= {"grad_norm"} if case["adapter"] else set()
    skipped |= {"num_tokens"} if layout == "packed" else set()
    log = next(log for log in trainer.state.log_history if "loss" in log)
    for name in case["log"].keys() - skipped:
        assert log[name] == pytest.approx(case["log"][name], rel=1e-4, abs=1e-5), name
    if not case["adapter"]:
        metrics = trainer.evaluate()
        for name in case["eval"].keys() - {f"eval_{name}" for name in skipped} - {"eval_num_tokens"}:
            assert metrics[name] == pytest.approx(case["eval"][name], rel=1e-4, abs=1e-5), name
