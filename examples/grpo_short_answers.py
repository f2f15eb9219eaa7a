"""GRPO on a real model with rewards that a program checks: answers of one short sentence, on the subject.

    python examples/grpo_short_answers.py --model MODEL [--steps 25] [--output_dir OUT]

MODEL is a small instruction model, e.g. SmolLM2-135M-Instruct: minutes on one CPU core. It is asked everyday questions
"in one sentence of at most ten words", and earns 1 for a finished sentence of so many words, and 1 for naming what was
asked about once. Printed are the shares of answers that earn either and both, with 95 % confidence intervals, on
questions about things that training never mentions, before and after, drawn at temperature 1 from the same seed.
"""

import argparse
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset
from peft import LoraConfig

from strop import GRPOConfig, GRPOTrainer
from strop.rollout.types import Rollout

SYSTEM = "Answer in one sentence of at most ten words."
LEAST_WORDS, MOST_WORDS = 5, 10
QUESTIONS = ("What is a {}?", "What is a {} good for?", "Where would I find a {}?", "Who needs a {}?")
TRAINED = (
    "lamp bridge pencil bicycle kettle ladder mirror hammer blanket clock basket candle boat window spoon whistle "
    "bucket drum fence glove helmet jacket lantern map needle pillow rope scarf tent towel wallet wheel bell "
    "broom brush button camera carpet chair chimney coin compass cup curtain door drawer fork garden hat"
)
HELDOUT = (
    "knife kite key bottle stove sail shovel saddle raft purse piano pan notebook net mop magnet lock "
    "library jar guitar fountain flag ferry desk coat clarinet bed barn balloon backpack tower violin"
)

Row = dict[str, Any]


def rows(things: str) -> list[Row]:
    """Every question about every thing, in an order of no meaning."""
    asked = [(question.format(thing), thing) for thing in things.split() for question in QUESTIONS]
    random.Random(0).shuffle(asked)
    system = {"role": "system", "content": SYSTEM}
    return [{"prompt": [system, {"role": "user", "content": text}], "thing": thing} for text, thing in asked]


def text_of(completion: list[dict[str, str]]) -> str:
    return completion[-1]["content"].strip()


def short(completions: Sequence[list[dict[str, str]]], **columns: Any) -> list[float]:
    """1 for one finished sentence of 5 to 10 words."""
    texts = map(text_of, completions)
    sentence = re.compile(r"[^.!?\n]+[.!?]")
    return [float(bool(sentence.fullmatch(t)) and LEAST_WORDS <= len(t.split()) <= MOST_WORDS) for t in texts]


def on_subject(completions: Sequence[list[dict[str, str]]], thing: Sequence[str], **columns: Any) -> list[float]:
    """1 for naming what was asked about, once: "A kite is a kite." says nothing."""
    texts = map(text_of, completions)
    return [float(len(re.findall(rf"\b{name}", t.lower())) == 1) for t, name in zip(texts, thing, strict=True)]


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of Wilson's score for `share` of `count` independent cases."""
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return middle - half, middle + half


def answers(trainer: GRPOTrainer, asked: Sequence[Row]) -> list[Rollout]:
    """One answer a row, drawn with the same random numbers each time."""
    return trainer.episodes.roll_out(asked, range(len(asked)), replace(trainer.args.sampling, seed=1))


def report(when: str, written: Sequence[Rollout]) -> float:
    """Print a line of the table; the share that earns both rewards."""
    completions, count = [one.completion for one in written], len(written)
    first, second = short(completions), on_subject(completions, [one.row["thing"] for one in written])
    cells = []
    for earned in (first, second, [a * b for a, b in zip(first, second, strict=True)]):
        share = sum(earned) / count
        low, high = wilson(share, count)
        cells.append(f"{share:.2f} ({low:.2f} to {high:.2f})")
    words = sum(len(text_of(completion).split()) for completion in completions) / count
    print(f"{when:8}" + "".join(f"{cell:>24}" for cell in cells) + f"{words:8.1f}")
    return share


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--output_dir", default="grpo-short-answers")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--num_heldout", type=int, default=96)
    options = parser.parse_args(argv)
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=[short, on_subject],
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            num_generations=8,
            per_device_train_batch_size=32,
            max_completion_length=24,
            logging_steps=5,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(rows(TRAINED)),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    print(trainer.batch_plan())
    asked = rows(HELDOUT)[: options.num_heldout]
    began = time.process_time(), time.monotonic()
    before = answers(trainer, asked)
    trainer.train()
    after = answers(trainer, asked)
    trainer.save_model()
    cpu, wall = (now - then for now, then in zip((time.process_time(), time.monotonic()), began, strict=True))
    print(f"\n{len(asked)} questions about things never trained\n")
    print(" " * 8 + "".join(f"{title:>24}" for title in ("short", "on subject", "both")) + f"{'words':>8}")
    report("before", before)
    report("after", after)
    for one, other in list(zip(before, after, strict=True))[:3]:
        print(f"\n{one.row['prompt'][-1]['content']}")
        print(f"  before: {text_of(one.completion)!r}\n  after:  {text_of(other.completion)!r}")
    print(f"\n{cpu / 60:.1f} CPU minutes, {wall / 60:.1f} minutes in all, both measurements included")


if __name__ == "__main__":
    main()
