"""Online DPO: which of two completions is trained to be likelier, by which loss, whoever says so."""

import copy
import functools
import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from strop.data.collate import Batch
from strop.losses.reduce import StepCounts
from strop.models.logps import TokenScores
from strop.models.reference import AdapterOff, FrozenModel
from strop.rewards import BasePairwiseJudge
from strop.rollout.types import Rollout
from strop.trainer.online import with_reward_model
from strop.trainer.online_dpo import OnlineDPOConfig, OnlineDPOTrainer, Told

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "online_losses.json").read_text())["online_dpo"]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def vowels(completions, **_):
    return [float(sum(map(text.count, "aeiou"))) for text in completions]


@pytest.fixture
def make(make_rollout_trainer):
    return functools.partial(make_rollout_trainer, OnlineDPOTrainer)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def in_pairs(values):
    """First completions of all prompts, then the second ones, as pairs."""
    return torch.stack(values.chunk(2), 1).flatten(0, 1)


def scored(scores, ends, name="vowels"):
    return [
        Rollout({}, [1, 2], [0, 1], [0.0, 0.0], "stop" if end else "length", {name: score}, prompt_length=1)
        for score, end in zip(scores, ends, strict=True)
    ]


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=lambda c: f"{c['loss_type']} penalty {c['missing_eos_penalty']}")
def test_the_numbers_of_trl_but_for_the_tie(case, make, monkeypatch):
    """TRL trains the tied pair as if its first were better; here it trains nothing, so the mean is one of three."""
    penalty = case["missing_eos_penalty"]
    trainer = make(loss_type=case["loss_type"], beta=[case["beta"]], missing_eos_penalty=penalty)
    mask = in_pairs(torch.tensor(GOLDENS["completion_mask"]))
    written = (row for row in zip(GOLDENS["completion_ids"], GOLDENS["completion_mask"], strict=True))
    ends = in_pairs(torch.tensor([2 in [i for i, m in zip(*row, strict=True) if m] for row in written])).tolist()
    rollouts = scored(in_pairs(torch.tensor(case["scores"])).tolist(), ends)
    trainer._finish(rollouts, 2)
    tied = torch.tensor([rollout.advantage == 0 for rollout in rollouts])
    assert tied.tolist() == [False] * 4 + [True] * 2 + [False] * 2
    policy, reference = (in_pairs(doubles(GOLDENS[name])) for name in ("logps", "ref_logps"))
    gradients = in_pairs(doubles(case["grad_logps"])) * 4 / 3
    (ratio,) = ((policy - reference) * mask).sum(-1)[tied].view(-1, 2).diff().neg()
    of_tie = -logsigmoid(0.1 * ratio) if case["loss_type"] == "sigmoid" else (ratio - 5) ** 2
    policy.requires_grad_()
    monkeypatch.setattr("strop.trainer.online_dpo.logps", lambda *_, **__: TokenScores(policy))
    batch: Batch = {"completion_mask": mask * ~tied[:, None], "ref_logps": reference, "temperature": 1.0}
    batch["advantages"] = doubles([[rollout.advantage] for rollout in rollouts])
    loss, metrics = trainer.loss(None, batch, trainer.count(batch))
    loss.backward()
    torch.testing.assert_close(loss, (doubles(case["loss"]) * 4 - of_tie.item()) / 3, **EXACT)
    torch.testing.assert_close(policy.grad, torch.where(tied[:, None], 0.0, gradients), **EXACT)
    ratios = ((policy - reference) * batch["completion_mask"]).sum(-1).detach()
    assert [x.item() if isinstance(x, torch.Tensor) else x for x in metrics["objective/kl"]] == pytest.approx(
        [ratios.sum().item(), 6]
    )


def test_scores_are_those_after_the_penalty(make):
    trainer = make(missing_eos_penalty=1.0)
    rollouts = scored([1.0, 1.5, None, 2.0, 0.25, 0.25], [True, False, True, True, False, True])
    trainer._finish(rollouts, 2)
    assert [rollout.advantage for rollout in rollouts] == [1, -1, 0, 0, -1, 1]
    assert rollouts[0].extras["preference"] == pytest.approx(1 / (1 + math.exp(-0.5)))
    metrics = {name: s / w for name, (s, w) in trainer.measured_rewards(rollouts, 2).items()}
    assert metrics["objective/scores"] == metrics["reward"] == pytest.approx((1 + 0.5 + 2 - 0.75 + 0.25) / 5)
    assert metrics["objective/scores_margin"] == pytest.approx((0.5 + 1) / 2)
    assert metrics["val/contain_eos_token"] == pytest.approx(4 / 6)
    assert metrics["preferences/no_verdict"] == pytest.approx(1 / 3)


def test_it_begins_at_ln_2_and_sizes_count_prompts(make, prompts):
    trainer = make(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    plan = trainer.batch_plan()
    assert (plan.prompts_per_block, plan.completions_per_step, plan.steps_per_epoch) == (4, 8, 2)
    assert "4 prompts x 2 = 8 completions (4 a device" in str(plan)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert log["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert log["objective/rlhf_reward"] == pytest.approx(log["objective/scores"], abs=1e-5)
    assert len(trainer.buffer.experiences) == 2  # the last block has the fifth prompt


class Says(BasePairwiseJudge):
    def __init__(self, *found):
        self.found = list(found)

    def compare(self, prompts, pairs, flipped):
        assert len(prompts) == len(pairs) == len(flipped)
        return [self.found[i % len(self.found)] for i in range(len(pairs))]


JUDGED = {
    "hard": ([1, -1, -1, 1, 0, 0, 0, 0], [True] * 4 + [False] * 4),
    "soft": ([0.6, -0.6, -0.8, 0.8, 0, 0, 0, 0], [True] * 6 + [False] * 2),
}


@pytest.mark.parametrize("kind", JUDGED)
def test_a_judge_says_which_is_better(kind, make):
    judge = Says(0.8, 0.1, 0.5, None)
    trainer = make(rewards=None, more={"judge": judge}, soft_preferences=kind == "soft", max_steps=1)
    trainer.train()
    experiences = trainer.buffer.experiences
    advantages, trained = JUDGED[kind]
    assert [one.advantage for one in experiences] == pytest.approx(advantages)
    assert [any(one.completion_mask) for one in experiences] == trained
    log = trainer.state.log_history[0]
    assert (log["preferences/ties"], log["preferences/no_verdict"]) == (0.25, 0.25)
    assert log["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert not {"reward", "objective/scores", "objective/rlhf_reward", "frac_reward_zero_std"} & log.keys()
    (file,) = Path(trainer.args.output_dir, "rollouts").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["preference"] for line in lines] == pytest.approx([0.8, 0.2, 0.1, 0.9, 0.5, 0.5, None, None])
    assert [line["trained"] for line in lines] == trained


def test_a_soft_tie_brings_its_two_together(make):
    """It is trained, towards no margin, and is in no count of which is better."""
    trainer = make(rewards=None, more={"judge": Says(0.5)}, soft_preferences=True, beta=0.5)
    ratios = doubles([[2.0, -1.0]]).requires_grad_()
    told = Told(ratios, torch.zeros_like(ratios), torch.tensor([[3, 3]]), doubles([0.5]))
    loss, metrics = trainer.losses(told)
    loss.sum().backward()
    push = 0.5 * (torch.sigmoid(doubles(1.5)) - 0.5)  # d/dh of -(log s(bh) + log s(-bh)) / 2 is b (s(bh) - 1/2)
    torch.testing.assert_close(ratios.grad, torch.stack([push, -push])[None], **EXACT)
    assert (metrics["rewards/accuracies"][1], metrics["objective/kl"][1], metrics["beta"][1]) == (0, 2, 1)


def test_pairs_without_a_preference_train_nothing(make, tiny_llama, caplog):
    alike = make(rewards=lambda completions, **_: [1.0] * len(completions), max_steps=1, learning_rate=10.0)
    alike.train()
    for one, other in zip(alike.model.parameters(), tiny_llama.parameters(), strict=True):
        assert torch.equal(one, other)
    assert alike.state.log_history[0]["preferences/ties"] == 1
    rewards = [1.0, 2.0, None, 5.0, 1.0, 1.0, 0.0, -1.0]
    some = make(rewards=lambda completions, **_: rewards, max_steps=1)
    some.train()
    masked = [not any(one.completion_mask) for one in some.buffer.experiences]
    assert masked == [False, False, True, True, True, True, False, False]
    assert "nobody could say which is better in 1 of 4 pairs" in caplog.text


def test_a_pair_with_a_truncated_completion_can_be_left_out(make):
    trainer = make(mask_truncated_completions=True)
    rollouts = scored([1.0, 2.0, 1.0, 2.0], [True, False, True, True])
    trainer._finish(rollouts, 2)
    assert [rollout.advantage for rollout in rollouts] == [0, 0, -1, 1]


CUTS = (
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 2},
    {"layout": "padded", "activation_checkpointing": False},
)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo"])
def test_a_step_is_the_same_however_it_is_cut(loss_type, make, prompts):
    """Of TRL the gradient is as many times too large as there are micro-batches."""
    rate = 0.01 if loss_type == "ipo" else 0.5

    def reward(completions, word, **_):  # one of the prompts has a tie
        return [0.0 if w == "wet" else len(c) for c, w in zip(completions, word, strict=True)]

    def run(**config):
        trainer = make(
            rewards=reward,
            rows=prompts.select(range(4)),
            learning_rate=rate,
            loss_type=loss_type,
            max_steps=2,
            **config,
        )
        trainer.train()
        left_out = ("step_time", "epoch", "learning_rate", "step", "grad_norm", "num_tokens")
        logs = [log for log in trainer.state.log_history if "loss" in log]
        return weights(trainer), [{k: v for k, v in log.items() if k not in left_out} for log in logs]

    whole, logs = run()
    assert any(log["preferences/ties"] == 0.25 for log in logs)
    for options in CUTS:
        found, other = run(**options)
        for name, weight in whole.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=f"{options} {name}")
        for one, two in zip(logs, other, strict=True):
            assert one == pytest.approx(two, rel=1e-3, abs=1e-4)


def test_log_ratios_are_the_policys_own_at_any_sampling_temperature(make):
    """The implicit reward is log pi/ref of the model; what is drawn at 0.9 is scored at 1."""
    found = []
    for temperature in (0.5, 2.0):
        trainer = make(temperature=temperature, learning_rate=0.5)
        trainer.train()
        found.append(weights(trainer))
    for name, weight in found[0].items():
        assert torch.equal(weight, found[1][name]), name


def test_the_better_one_becomes_likelier(make):
    trainer = make(
        generator=None,
        rewards=lambda completion_ids, **_: [sum(i < 200 for i in ids) for ids in completion_ids],
        optim="adamw_torch",
        learning_rate=0.02,
        max_steps=14,
        per_device_train_batch_size=32,
        rows=Dataset.from_list([{"prompt": f"What is {i}?"} for i in range(32)]),
        max_completion_length=4,
        gradient_checkpointing=False,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[0]["reward"] < 2.5
    assert logs[-1]["reward"] > 3.5
    assert all(0 <= log["rewards/accuracies"] <= 1 for log in logs if "rewards/accuracies" in log)


def test_beta_has_a_value_an_epoch(make, prompts):
    trainer = make(
        beta=[0.1, 0.4], num_train_epochs=3, max_steps=-1, per_device_train_batch_size=2, more={"eval_dataset": prompts}
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["beta"] for log in logs] == pytest.approx([0.1] * 3 + [0.4] * 6)
    with pytest.raises(ValueError, match=r"beta=\[0\.1, 0\.4\] .* a stream has only one"):
        make(beta=[0.1, 0.4], rows=prompts.to_iterable_dataset())
    assert make(beta=[0.3]).args.beta == 0.3


@pytest.mark.parametrize("rewards", ["vowels", "judge"])
def test_evaluations_are_the_same_in_rounds_of_any_size(rewards, make, prompts):
    options = {"rewards": None, "more": {"judge": Says(0.8), "eval_dataset": prompts}}
    options = options if rewards == "judge" else {"more": {"eval_dataset": prompts}}
    found = []
    for size in (1, 3, 8):
        trainer = make(per_device_eval_batch_size=size, max_steps=0, **copy.copy(options))
        found.append({k: v for k, v in trainer.evaluate().items() if "second" not in k and "time" not in k})
    assert found[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    spreads = {name for name in found[0] if name.endswith(("/std", "_std"))}  # those of a round
    for other in found[1:]:
        assert {k: v for k, v in found[0].items() if k not in spreads} == pytest.approx(
            {k: v for k, v in other.items() if k not in spreads}, rel=1e-4, abs=1e-4
        )


# The reference


def test_a_fresh_adapter_is_compared_with_the_model_without_it(make):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    trainer = make(more={"peft_config": config}, learning_rate=0.5)
    assert isinstance(trainer.reference, AdapterOff)
    assert trainer.ref_model is None
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert abs(logs[1]["objective/kl"]) > 1e-3


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_reference_of_ones_own(layout, make, tiny_llama, tmp_path):
    other = copy.deepcopy(tiny_llama)
    for parameter in other.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    other.save_pretrained(tmp_path / "other")
    logs = []
    for given in (copy.deepcopy(other), str(tmp_path / "other")):
        trainer = make(more={"ref_model": given}, max_steps=1, layout=layout)
        assert isinstance(trainer.reference, FrozenModel)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert abs(logs[0]["objective/kl"]) > 0.1
    assert logs[0]["objective/kl"] == pytest.approx(logs[1]["objective/kl"], rel=1e-5)
    assert logs[0]["objective/kl"] == pytest.approx(-logs[0]["objective/non_score_reward"] / 0.1, rel=1e-5)


def test_a_moving_reference_moves(make):
    trainer = make(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0, learning_rate=0.5)
    trainer.train()
    for one, other in zip(trainer.model.parameters(), trainer.reference.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert trainer.state.log_history[1]["objective/kl"] == pytest.approx(0, abs=1e-5)


# What is refused, and what is called otherwise


def config(**options):
    return OnlineDPOConfig(output_dir="unused", use_cpu=True, **options)


def test_lengths_by_both_names():
    assert (config().max_completion_length, config().max_prompt_length) == (64, 448)
    found = config(max_new_tokens=10, max_length=50)
    assert (found.sampling.max_tokens, found.max_completion_length, found.max_prompt_length) == (10, 10, 40)
    assert config(max_new_tokens=10, max_prompt_length=20).max_prompt_length == 20
    assert config(max_length=None).max_prompt_length is None
    with pytest.raises(ValueError, match="two names of one option"):
        config(max_new_tokens=10, max_completion_length=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 512}, "max_length=512 has no room for a prompt"),
        ({"num_generations": 4}, "num_generations=4 would have no effect"),
        ({"epsilon": 0.2}, r"epsilon=0\.2 would have no effect"),
        ({"replay_buffer_size": 8}, "replay_buffer_size=8 would have no effect"),
        ({"dynamic_sampling_rounds": 1}, "dynamic_sampling_rounds=1 would have no effect"),
        ({"beta": 0.0}, r"beta=0\.0 is out of range"),
        ({"beta": []}, "has no value"),
        ({"beta": [0.1, -1.0]}, "out of range"),
        ({"loss_type": "aot"}, "loss_type='aot' is unknown"),
        ({"loss_type": "sigmoidd"}, "Did you mean 'sigmoid'"),
        ({"temperature": 0.0}, "nothing to compare"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        ({"judge": Says(1.0)}, {}, "both a judge .* and rewards"),
        ({"judge": Says(1.0)}, {"rewards": None, "missing_eos_penalty": 1.0}, "a judge, which gives no rewards"),
        ({"judge": "gpt"}, {"rewards": None}, "no method `judge`"),
        ({}, {"rewards": None}, "nothing tells which completion is better"),
        ({"compute_metrics": print}, {}, "compute_metrics=.* would have no effect"),
        ({"data_collator": print}, {}, "data_collator=.* would have no effect"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(more, options, message, make):
    with pytest.raises(ValueError, match=message):
        make(more=more, **options)


def test_the_reference_must_be_another_model(tiny_llama, prompts, bpe_tokenizer):
    with pytest.raises(ValueError, match="ref_model is the model itself"):
        OnlineDPOTrainer(tiny_llama, tiny_llama, vowels, config(), None, prompts, None, bpe_tokenizer)


def test_a_reward_model_by_its_path_is_one_of_the_rewards(make, tiny_llama, bpe_tokenizer, tmp_path):
    folder = str(tmp_path / "scorer")
    shape = copy.deepcopy(tiny_llama.config)
    shape.num_labels = 1
    AutoModelForSequenceClassification.from_config(shape).save_pretrained(folder)
    bpe_tokenizer.save_pretrained(folder)
    trainer = make(reward_model_path=folder, reward_weights=[0.0, 1.0], max_steps=1)
    assert trainer.reward_names == ["vowels", "scorer"]
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["objective/scores"] == pytest.approx(log["rewards/scorer/mean"], rel=1e-5)
    alone = make(rewards=None, reward_model_path=folder, max_steps=1)
    assert alone.reward_names == ["scorer"]
    for own in (None, bpe_tokenizer, [bpe_tokenizer]):  # of the first one alone
        functions, tokenizers = with_reward_model(folder, own, trainer.args)
        assert functions == [folder, folder]
        assert tokenizers == ([None, None] if own is None else [bpe_tokenizer, None])


def test_counts_are_pairs(make):
    trainer = make()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert trainer.count({"completion_mask": mask}) == StepCounts(3, 1)
    assert trainer.count({"completion_mask": torch.zeros(1, 2)}) == StepCounts(0, 0)
