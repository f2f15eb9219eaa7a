"""One optimizer step of DPO gives TRL's numbers, from raw pairs to updated weights, packed and padded.

The goldens are TRL 1.16 on a 2-layer Llama in float32 with eager attention under SGD, then an evaluation. Not compared
is what differs on purpose: means over micro-batches of different size, ties, which count half here, and `num_tokens`,
which counts a shared prompt once. An adapter starts with other random numbers.
"""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop import DPOConfig, DPOTrainer
from strop.models.logps import TokenScores
from strop.trainer import dpo
from strop.trainer.dpo_config import as_list

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


LOSSES = json.loads((GOLDENS / "preference_losses.json").read_text())
MIXTURES = [  # their numbers alone are kept
    {"args": {"loss_type": "sft"}, "dtype": "float64", "loss": 0.8286091641170357, "gradient": None},
    {
        "args": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "beta": 0.1},
        "dtype": "float64",
        "loss": 1.5730619522330695,
        "gradient": None,
    },
]
IGNORED_BY_TRL = "sigmoid_ls0.2"
SETTINGS = {
    **{"loss_type": "sigmoid", "loss_weights": None, "beta": 0.1, "label_smoothing": 0.0, "discopop_tau": 0.05},
    **{"f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "ld_alpha": None, "use_weighting": False},
}


def side_by_side(values, dtype) -> torch.Tensor:
    """Rows of chosen, rejected, chosen, ... from those with all chosen first."""
    return torch.stack(torch.tensor(values, dtype=dtype).chunk(2), 1).flatten(0, 1)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return run(CASES[0], tmp_path_factory.mktemp("run"))


CASES_OF_LOSSES = [case for case in LOSSES["cases"] if case["name"] != IGNORED_BY_TRL] + MIXTURES


@pytest.mark.parametrize("case", CASES_OF_LOSSES, ids=lambda case: str(case.get("name", case["args"]["loss_type"])))
def test_the_trainers_loss_of_given_log_probabilities_equals_trl(trainer, monkeypatch, case):
    for name, value in (SETTINGS | case["args"]).items():
        setattr(trainer.args, name, as_list(value) if name == "loss_type" else value)
    dtype = getattr(torch, case["dtype"])
    policy = side_by_side(LOSSES["logps"], dtype).requires_grad_()
    collision, zeros = side_by_side(LOSSES["log_collision"], dtype), torch.zeros_like(policy)
    monkeypatch.setattr(dpo, "logps", lambda *_, **__: TokenScores(policy, zeros, zeros, None, collision))
    mask = side_by_side(LOSSES["mask"], torch.int64)
    batch = {"completion_mask": mask, "reference": side_by_side(LOSSES["reference_logps"], dtype)}
    loss, _ = trainer.loss(trainer.model, batch, trainer.count(batch))
    loss.backward()
    is_exact = case["dtype"] == "float64" and case["args"]["loss_type"] != "exo_pair"  # whose smoothing is float32
    close = {"rtol": 1e-9, "atol": 1e-9} if is_exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(loss, torch.tensor(case["loss"], dtype=dtype), **close)
    if case["gradient"]:
        torch.testing.assert_close(policy.grad, side_by_side(case["gradient"], dtype), **close)
