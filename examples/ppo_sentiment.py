"""PPO against a learned reward on a real model: reviews that turn out kinder, near the model they began as.

    python examples/ppo_sentiment.py --model MODEL [--updates 40] [--output_dir OUT]

MODEL is a small language model, e.g. SmolLM2-135M-Instruct. First a reward model learns from pairs of a pleased and a
displeased sentence about the same thing (`reviews.py`); then PPO trains the policy to go on from "The hotel was" so
that the reward model is pleased, with a penalty for leaving what it was. Printed are, for things that neither training
mentions, the mean reward, the share of continuations with kind and with unkind words (from lists that the pairs don't
use) with 95 % intervals, before and after, drawn from the same seed, and the KL divergence while it was trained.
"""

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import replace

from datasets import Dataset
from peft import LoraConfig
from reviews import HELDOUT, TRAINED, Row, pairs, prompts

from strop import PPOConfig, PPOTrainer, RewardConfig, RewardTrainer
from strop.evals.statistics import Estimate, Total, mean, proportion
from strop.rollout.types import Rollout

KIND = "good|great|beautiful|excellent|amazing|fantastic|nice|perfect|enjoy|enjoyed|happy|love|loved|friendly|fun"
UNKIND = "bad|poor|boring|dirty|broken|horrible|sad|ugly|hate|hated|annoying|rude|expensive|cold|slow|crowded"


def lora(task_type: str) -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=task_type)


def trained_reward(options: argparse.Namespace) -> str:
    """The folder of a reward model that tells pleased from displeased sentences."""
    trainer = RewardTrainer(
        model=options.model,
        args=RewardConfig(
            output_dir=f"{options.output_dir}/reward",
            per_device_train_batch_size=16,
            num_train_epochs=1,
            learning_rate=3e-4,
            center_rewards_coefficient=0.01,
            logging_steps=5,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(pairs(TRAINED)[: options.num_pairs]),
        eval_dataset=Dataset.from_list(pairs(HELDOUT)[:64]),
        peft_config=lora("SEQ_CLS"),
    )
    trainer.train()
    print(f"reward model: {trainer.evaluate()['eval_accuracy']:.2f} of held-out pairs in the right order")
    trainer.save_model()
    return trainer.args.output_dir


def written(trainer: PPOTrainer, asked: Sequence[Row]) -> list[Rollout]:
    """A scored continuation a row, drawn with the same random numbers each time."""
    rollouts = trainer.generate(asked, range(len(asked)), replace(trainer.args.sampling, seed=1))
    trainer.score(rollouts)
    return rollouts


def report(when: str, rollouts: Sequence[Rollout]) -> None:
    """Print a line of the table."""
    found = [mean([Total(sum(one.rewards.values())) for one in rollouts])]
    for words in (KIND, UNKIND):
        has = [bool(re.search(rf"\b({words})\b", one.completion.lower())) for one in rollouts]
        found.append(proportion([Total(float(one)) for one in has]))
    print(f"{when:8}" + "".join(f"{shown(one):>24}" for one in found))


def shown(one: Estimate) -> str:
    return f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--reward_model", help="one that is there already")
    parser.add_argument("--output_dir", default="ppo-sentiment")
    parser.add_argument("--num_pairs", type=int, help="that the reward model learns from; all if not given")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--kl_coef", type=float, default=0.1)
    options = parser.parse_args(argv)
    began = time.process_time(), time.monotonic()
    batch = 32
    trainer = PPOTrainer(
        model=options.model,
        reward_model=options.reward_model or trained_reward(options),
        args=PPOConfig(
            output_dir=options.output_dir,
            total_episodes=options.updates * batch,
            per_device_train_batch_size=batch,
            num_ppo_epochs=2,
            response_length=16,
            temperature=1.0,
            learning_rate=options.learning_rate,
            kl_coef=options.kl_coef,
            value_function="shared",
            logging_steps=2,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(prompts(TRAINED)),
        peft_config=lora("CAUSAL_LM"),
    )
    print(trainer.batch_plan())
    asked = prompts(HELDOUT)
    before = written(trainer, asked)
    trainer.train()
    after = written(trainer, asked)
    trainer.save_model()
    cpu, wall = (now - then for now, then in zip((time.process_time(), time.monotonic()), began, strict=True))
    print(f"\n{len(asked)} openings about things never trained\n")
    print(" " * 8 + "".join(f"{title:>24}" for title in ("reward", "kind words", "unkind words")))
    report("before", before)
    report("after", after)
    divergences = [entry["objective/kl"] for entry in trainer.state.log_history if "objective/kl" in entry]
    print(f"\nKL from the model it was, nats a continuation: {', '.join(f'{kl:.1f}' for kl in divergences)}")
    for one, other in list(zip(before, after, strict=True))[:4]:
        print(f"\n{one.row['prompt']}\n  before: {one.completion!r}\n  after:  {other.completion!r}")
    print(f"\n{cpu / 60:.1f} CPU minutes, {wall / 60:.1f} minutes in all, measurements included")


if __name__ == "__main__":
    main()
