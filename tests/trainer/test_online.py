"""What trainers on pairs share: two processes do what one does, also where they part a pair and ask a judge."""

import copy
import functools

import pytest
import torch
from peft import LoraConfig
from transformers import GenerationConfig

from strop.callbacks.win_rate import WinRateCallback
from strop.rewards import BasePairwiseJudge
from strop.trainer.nash_md import NashMDTrainer
from strop.trainer.online_dpo import OnlineDPOTrainer
from strop.trainer.ppo import PPOTrainer
from strop.trainer.xpo import XPOTrainer


class Longer(BasePairwiseJudge):
    """Sure of large differences; has no verdict on empty texts. Counts what it is asked."""

    asked = 0

    def compare(self, prompts, pairs, flipped):
        self.asked += len(pairs)
        gaps = [len(first) - len(second) for first, second in pairs]
        return [1 / (1 + 2.0**-gap) if all(pair) else None for gap, pair in zip(gaps, pairs, strict=True)]


GREEDY = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=2, pad_token_id=0)
CASES = {
    "online dpo by rewards": (
        OnlineDPOTrainer,
        {"missing_eos_penalty": 0.5, "loss_type": "ipo", "learning_rate": 0.01},
    ),
    "online dpo by a judge": (OnlineDPOTrainer, {"rewards": None, "soft_preferences": True}),
    "xpo": (XPOTrainer, {"alpha": 0.01, "steps_per_generation": 2, "num_iterations": 2}),
    "nash md by a judge": (NashMDTrainer, {"rewards": None, "mixture_coef": 0.3}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_what_one_does(case, make_rollout_trainer, prompts, on_two_ranks):
    trainer_class, config = CASES[case]
    config = {"learning_rate": 0.1, "num_train_epochs": 1, "max_steps": -1} | config
    make = functools.partial(make_rollout_trainer, trainer_class, **config)

    def run(size=2):
        judge = Longer() if "judge" in case else None
        trainer = make(per_device_train_batch_size=size, more={"eval_dataset": prompts, "judge": judge})
        if case == "xpo":
            trainer.add_callback(WinRateCallback(Longer(), trainer, GREEDY, num_prompts=3))
        trainer.train()
        asked = judge.asked if judge else 0
        left_out = ("time", "second", "epoch", "flos", "learning_rate", "step", "std")
        keep = lambda log: {k: v for k, v in log.items() if not any(word in k for word in left_out)}  # noqa: E731
        weights = {
            name: p.detach().clone() for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        }
        history = [keep(log) for log in trainer.state.log_history if "loss" in log]
        return {"weights": weights, "logs": history, "evaluation": keep(trainer.evaluate()), "asked": asked}

    whole, ranks = run(4), on_two_ranks(run)
    assert sum(found["asked"] for found in ranks) == whole["asked"] == (5 if "judge" in case else 0)
    assert ("eval_win_rate" in whole["evaluation"]) == (case == "xpo")
    for found in ranks:
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5, msg=name)
        pairs = zip([*found["logs"], found["evaluation"]], [*whole["logs"], whole["evaluation"]], strict=True)
        for one, other in pairs:
            assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(("trainer_class", "tuned"), [(NashMDTrainer, "adapter"), (XPOTrainer, "whole")])
def test_a_step_is_the_same_however_it_is_cut(trainer_class, tuned, make_rollout_trainer, prompts):
    more = {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")}
    more = more if tuned == "adapter" else {}

    def run(**config):
        trainer = make_rollout_trainer(
            trainer_class, rows=prompts.select(range(4)), learning_rate=0.1, more=more, **config
        )
        trainer.train()
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}

    whole = run()
    for options in (
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 2},
        {"layout": "padded", "activation_checkpointing": False},
    ):
        for name, weight in run(**options).items():
            torch.testing.assert_close(weight, whole[name], rtol=1e-4, atol=1e-5, msg=f"{options} {name}")


@pytest.mark.parametrize("trainer_class", [OnlineDPOTrainer, PPOTrainer])
def test_a_reference_that_packs_wrongly_pads_the_run(trainer_class, make_rollout_trainer, tiny_llama, caplog):
    """It is found out on the first batch, as for the policy."""
    given = copy.deepcopy(tiny_llama)
    forward = given.model.forward
    given.model.forward = lambda *args, **more: forward(*args, **{**more, "position_ids": None})
    logs = {}
    for layout in ("auto", "padded"):
        trainer = make_rollout_trainer(trainer_class, max_steps=1, layout=layout, more={"ref_model": given})
        trainer.train()
        logs[layout] = trainer.state.log_history[0]
        assert ("so this run pads its rows" in caplog.text) == (layout == "auto")
        caplog.clear()
    assert logs["auto"]["objective/kl"] == pytest.approx(logs["padded"]["objective/kl"], abs=1e-5)
    assert logs["auto"]["loss"] == pytest.approx(logs["padded"]["loss"], abs=1e-5)
