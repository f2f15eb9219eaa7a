"""Preference optimisation and reward models, measured on pairs of questions held out.

    python examples/preferences.py dpo    --model MODEL --train pairs_train.jsonl --test pairs_test.jsonl
    python examples/preferences.py reward --model MODEL --train pairs_train.jsonl --test pairs_test.jsonl

The files hold {"prompt", "chosen", "rejected"}, plain text, a row a line; `gsm8k_pairs.py` makes such. MODEL is a
language model, or for a reward model also an encoder. Printed is how many held-out pairs the trained model puts in the
right order, with a 95 % confidence interval over pairs, and one over questions, as pairs of one question are alike.
"""

import argparse
import math
import random
from typing import Any

from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from strop import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of Wilson's score for `share` of `count` independent cases."""
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return middle - half, middle + half


def over_questions(right: list[float], questions: list[str], draws: int = 2000) -> tuple[float, float]:
    """The bootstrap interval of the mean of `right` when questions are drawn, each with all its pairs."""
    by_question: dict[str, list[float]] = {}
    for value, question in zip(right, questions, strict=True):
        by_question.setdefault(question, []).append(value)
    groups, rng = list(by_question.values()), random.Random(0)
    means = []
    for _ in range(draws):
        drawn = rng.choices(groups, k=len(groups))
        means.append(sum(map(sum, drawn)) / sum(map(len, drawn)))
    means.sort()
    return means[int(0.025 * draws)], means[int(0.975 * draws) - 1]


def pairs(path: str, is_chat: bool, limit: int | None) -> Dataset:
    """The rows of a file, `limit` of them drawn at random: conversations if the model chats, else text."""
    rows = load_dataset("json", data_files=path, split="train").shuffle(seed=0)
    rows = rows.select(range(min(limit or len(rows), len(rows))))
    question = (lambda text: [{"role": "user", "content": text}]) if is_chat else (lambda text: text + "\n")
    answer = (lambda text: [{"role": "assistant", "content": text}]) if is_chat else (lambda text: text)
    roles = {"prompt": question, "chosen": answer, "rejected": answer}
    return rows.map(lambda row: {name: wrap(row[name]) for name, wrap in roles.items()})


def lora() -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")


def trainer_of(method: str, args: argparse.Namespace, train: Dataset, is_encoder: bool) -> Any:
    """The trainer; encoders are small enough to be trained whole."""
    settings = {
        "output_dir": args.output_dir,
        "num_train_epochs": args.epochs,
        "per_device_train_batch_size": args.batch_size,
        "per_device_eval_batch_size": 16,
        "learning_rate": args.learning_rate,
        "warmup_steps": 0.1,
        "max_length": 512,
        "activation_checkpointing": False,
        "bf16": args.bf16,
        "save_strategy": "no",
        "logging_steps": 5,
    }
    if method == "dpo":
        config = DPOConfig(**settings, beta=args.beta)
        return DPOTrainer(model=args.model, args=config, train_dataset=train, peft_config=lora())
    config = RewardConfig(**settings, center_rewards_coefficient=0.01, overlong="truncate")  # all pairs are measured
    adapter = None if is_encoder else lora()
    return RewardTrainer(model=args.model, args=config, train_dataset=train, peft_config=adapter)


def report(rewards: Any, questions: list[str]) -> None:
    """Print the accuracy of `rewards` (N, 2) of chosen and rejected."""
    right = [(1.0 if chosen > rejected else 0.5 if chosen == rejected else 0.0) for chosen, rejected in rewards]
    share = sum(right) / len(right)
    ours, theirs = wilson(share, len(right)), over_questions(right, questions)
    print(
        f"{share:.1%} of {len(right)} held-out pairs are in the right order; 95 % interval {ours[0]:.1%} to "
        f"{ours[1]:.1%} over pairs, {theirs[0]:.1%} to {theirs[1]:.1%} over {len(set(questions))} questions"
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("dpo", "reward"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--output_dir", default="preferences-example")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--beta", type=float, default=0.1, help="of DPO")
    parser.add_argument("--bf16", action="store_true", help="faster where the processor knows bfloat16")
    parser.add_argument("--train_pairs", type=int, help="train on so many, drawn at random")
    parser.add_argument("--test_pairs", type=int, help="measure on so many, drawn at random")
    args = parser.parse_args(words)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    is_chat, is_encoder = tokenizer.chat_template is not None, tokenizer.cls_token is not None
    train, test = pairs(args.train, is_chat, args.train_pairs), pairs(args.test, is_chat, args.test_pairs)
    questions = [str(prompt) for prompt in test["prompt"]]
    trainer = trainer_of(args.method, args, train, is_encoder)
    trainer.train()
    trainer.save_model()
    report(trainer.predict(test).predictions.tolist(), questions)


if __name__ == "__main__":
    main()
