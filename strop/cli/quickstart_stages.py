"""The stages of the quickstart, each as anyone would write it: a config, a trainer, rows.

Each takes a model's folder and trains one LoRA adapter on, which the next one takes up.
"""

import random
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from peft import LoraConfig

from strop import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, evaluate
from strop.cli.quickstart_task import Task, correct
from strop.data.formats import Row
from strop.models.adapters import is_adapter

ROWS_PER_STEP = 8
STEPS = {"sft": 20, "dpo": 8, "grpo": 20}
MAX_NEW_TOKENS = 64
ANSWERS_A_PROBLEM = 4
MOST_PAIRS_A_PROBLEM = 2


def sft(model: str, task: Task, **settings: Any) -> SFTTrainer:
    """Learns the form of an answer from worked ones."""
    args = SFTConfig(
        **{"max_steps": STEPS["sft"], "learning_rate": 2e-3} | settings,
        per_device_train_batch_size=ROWS_PER_STEP,
        warmup_steps=2,
        max_length=512,
        logging_steps=4,
    )
    columns = [name for name in task.texts[0] if name in ("prompt", "completion", "messages", "text")]
    rows = Dataset.from_list([{name: row[name] for name in columns} for row in task.texts])
    return SFTTrainer(model, args, train_dataset=rows, peft_config=adapter(model))


def dpo(model: str, task: Task, **settings: Any) -> DPOTrainer:
    """Learns to tell its own right answers from its wrong ones, or whatever pairs there are."""
    pairs = task.pairs or own_pairs(model, task.answered, settings)
    args = DPOConfig(
        **{"max_steps": STEPS["dpo"], "learning_rate": 3e-4} | settings,
        per_device_train_batch_size=ROWS_PER_STEP // 2,
        warmup_steps=1,
        max_length=512,
        logging_steps=2,
    )
    rows = Dataset.from_list([{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in pairs])
    return DPOTrainer(model, args=args, train_dataset=rows, peft_config=adapter(model))


def grpo(model: str, task: Task, **settings: Any) -> GRPOTrainer:
    """Learns from what it writes: of eight answers to a problem, the right ones are made likelier."""
    args = GRPOConfig(
        **{"max_steps": STEPS["grpo"], "learning_rate": 2e-4} | settings,
        per_device_train_batch_size=4 * ROWS_PER_STEP,
        num_generations=ROWS_PER_STEP,
        max_completion_length=MAX_NEW_TOKENS,
        warmup_steps=1,
        logging_steps=4,
    )
    return GRPOTrainer(
        model,
        correct,
        args,
        train_dataset=Dataset.from_list([dict(row) for row in task.asked]),
        peft_config=adapter(model),
    )


def own_pairs(model: str, problems: Sequence[Row], settings: dict[str, Any]) -> list[Row]:
    """Pairs of a right and a wrong answer to the same problem, both of which the model wrote; where none is right, the
    worked answer takes its place if there are too few pairs otherwise.

    Raises ValueError where all answers are right.
    """
    options = {"num_samples": ANSWERS_A_PROBLEM, "max_new_tokens": MAX_NEW_TOKENS, "seed": settings["seed"]}
    written = evaluate(model, problems, correct, dtype=dtype_of(settings), **options).answers
    pairs: list[Row] = []
    worked: list[Row] = []
    for row, answers in zip(problems, written, strict=True):
        right, wrong = ([a.completion for a in answers if a.rewards["correct"] == value] for value in (1, 0))
        pairs += [
            {"prompt": row["prompt"], "chosen": better, "rejected": worse}
            for better, worse in list(zip(right, wrong, strict=False))[:MOST_PAIRS_A_PROBLEM]
        ]
        if not right:
            worked.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": wrong[0]})
    wanted = settings.get("max_steps", STEPS["dpo"]) * ROWS_PER_STEP // 2
    pairs += worked[: max(0, wanted - len(pairs))]
    if not pairs:
        raise ValueError(
            f"all {len(problems) * ANSWERS_A_PROBLEM} answers of {model} are right, so there is nothing to compare for "
            "dpo: leave it out, e.g. --stages sft grpo."
        )
    random.Random(settings["seed"]).shuffle(pairs)
    return pairs


def adapter(model: str) -> LoraConfig | None:
    """A new adapter on every linear layer; none for a model that has one."""
    if is_adapter(model, {}):
        return None
    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def precision() -> dict[str, Any]:
    """Settings for a CPU that multiplies bfloat16 matrices in hardware, about twice as fast; none elsewhere."""
    import torch

    can = torch.cpu.get_capabilities()
    if torch.accelerator.is_available() or not (can.get("amx_bf16") or can.get("avx512_bf16")):
        return {}
    return {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}


def dtype_of(settings: dict[str, Any]) -> str | None:
    """What `strop.evaluate` loads a model in that was trained with these settings."""
    return settings.get("model_init_kwargs", {}).get("dtype")
