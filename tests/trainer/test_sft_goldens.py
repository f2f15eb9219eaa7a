"""One optimizer step of supervised fine-tuning gives TRL's numbers, from raw rows to updated weights.

The goldens are TRL 1.16 on a 2-layer Llama in float32 with eager attention under SGD. Where a case's entropy or
accuracy was averaged over micro-batches of different size, ours is the mean over tokens and is not compared.
"""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop import SFTConfig, SFTTrainer

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = json.loads((GOLDENS / "sft_runs.json").read_text())
UNWEIGHTED = {"ga4_bs1"}


def run(case, tmp_path, **options):
    config = dict(case["config"])
    tokenizer = AutoTokenizer.from_pretrained(GOLDENS / "tiny_llama")
    if config.pop("tokenizer") == "tiny_tokenizer_gen":
        tokenizer.chat_template = (GOLDENS / "tiny_llama" / "generation_markers.jinja").read_text()
    args = SFTConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        activation_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        optim="sgd",
        seed=0,
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        **config | options,
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(GOLDENS / "tiny_llama"),
        args=args,
        train_dataset=Dataset.from_list(case["dataset"]),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("layout", ["auto", "padded"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_step_equals_trl(case, layout, tmp_path):
    if layout == "padded" and case["config"].keys() & {"packing", "padding_free"}:
        pytest.skip("these options ask for the packed layout")
    trainer = run(case, tmp_path, layout=layout)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == len(case["logs"])
    for ours, theirs in zip(logs, case["logs"], strict=True):
        skipped = {"entropy", "mean_token_accuracy"} if case["name"] in UNWEIGHTED else set()
        for name in theirs.keys() - skipped:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5, abs=1e-6), name
    total = sum(parameter.abs().sum().item() for parameter in trainer.model.parameters())
    assert total == pytest.approx(case["params_abs_sum_after"], rel=1e-6)
