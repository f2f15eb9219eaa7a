"""GRPO: the numbers of TRL, REINFORCE on-policy, and one gradient however a step is cut."""

import dataclasses
import json
import logging
import math
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState

from strop.callbacks.alarms import RolloutAlarm
from strop.losses.corrections import importance_correction
from strop.losses.policy import AGAINST_REFERENCE, POLICY_LOSSES
from strop.losses.reduce import StepCounts
from strop.models.head import Float32Head
from strop.models.logps import TokenScores, logps
from strop.trainer.grpo import GRPOConfig, GRPOTrainer
from strop.trainer.ratios import sampling_metrics

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "policy_losses.json").read_text())
CASES = [case for case in GOLDENS["cases"] if case["args"]["loss_type"] != "rloo"]
LOSSES = [name for name in POLICY_LOSSES if name not in AGAINST_REFERENCE]


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def make(make_rollout_trainer):
    """The scripted generator's log-probabilities aren't the model's, which counts where a test is about it."""

    def made(generator="scripted", **config):
        own = {"vllm_importance_sampling_correction": False} if generator == "scripted" else {}
        return make_rollout_trainer(GRPOTrainer, generator, **own | config)

    return made


# TRL's numbers


def golden_batch(args, policy, inputs):
    mask = inputs[args.get("mask", "mask")]
    if args.get("use_tool_mask"):
        mask = mask * inputs["tool_mask"]
    advantages = doubles(args["advantages"]) if "advantages" in args else inputs["advantages"][:, None]
    batch = {"completion_mask": mask, "advantages": advantages, "kl_weights": 1.0, "temperature": 1.0}
    if args.get("old") != "none":
        batch["old_logps"] = inputs["old_per_token_logps"]
    if "beta" in args:
        batch["ref_logps"] = inputs["ref_per_token_logps"]
    if "correction" in args or args.get("sampling_logps_in_inputs"):
        batch["sampling_logps"] = inputs["sampling_per_token_logps"]
    return batch


def golden_config(args):
    names = ("loss_type", "beta", "use_bias_correction_kl", "epsilon", "epsilon_high", "delta")
    names += ("sapo_temperature_pos", "sapo_temperature_neg", "off_policy_mask_threshold", "top_entropy_quantile")
    options = {name: args[name] for name in names if name in args}
    if args["loss_type"] not in ("gmpo", "vespo"):
        options["importance_sampling_level"] = args.get("importance_sampling_level", "token")
    if "correction" in args:
        bounds = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.3}
        options |= {"vllm_importance_sampling_mode": args["correction"]} | bounds
    else:
        options["vllm_importance_sampling_correction"] = False
    return GRPOConfig(output_dir="unused", use_cpu=True, max_completion_length=8, **options)


@pytest.fixture(scope="module")
def made():
    """The trainer of all cases; its settings are those of a case."""
    return []


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES])
def test_the_numbers_of_trl(case, make, made, monkeypatch):
    args = case["args"]
    trainer = made[0] if made else made.append(make()) or made[0]
    inputs = {name: doubles(value) for name, value in GOLDENS["inputs"].items()}
    policy = inputs["per_token_logps"].requires_grad_()
    trainer.args = golden_config(args)
    trainer.policy_loss, trainer.loss_options = trainer.args.policy_loss, trainer.args.loss_options
    monkeypatch.setattr("strop.trainer.grpo.logps", lambda *_, **__: TokenScores(policy, inputs["entropies"]))
    batch = golden_batch(args, policy, inputs)
    mask = batch["completion_mask"]
    loss, metrics = trainer.loss(None, batch, StepCounts(int(mask.sum()), len(mask)))
    loss.backward()
    close = {"rtol": 0, "atol": 2e-7 if args["loss_type"] == "sapo" else 1e-8}
    expected = case["loss"]
    if args["loss_type"] == "gmpo":  # where TRL gives a row without a token a constant
        kept = trainer.sampled(TokenScores(policy, inputs["entropies"]), batch)[0].kept.sum(-1) > 0
        expected += batch["advantages"][~kept].sum().item() / len(mask)
    torch.testing.assert_close(loss, doubles(expected), **close)
    torch.testing.assert_close(policy.grad, doubles(case["gradient"]), **close)
    entropy = (inputs["entropies"] * mask).sum() / mask.sum()
    assert metrics["entropy"][0] / metrics["entropy"][1] == pytest.approx(entropy.item())


def test_shares_of_clipped_ratios_are_trls(make, monkeypatch):
    trainer = make()
    inputs = {name: doubles(value) for name, value in GOLDENS["inputs"].items()}
    case = next(case for case in CASES if case["name"] == "grpo")
    trainer.args = golden_config(case["args"])
    trainer.policy_loss, trainer.loss_options = trainer.args.policy_loss, trainer.args.loss_options
    scores = TokenScores(inputs["per_token_logps"], inputs["entropies"])
    monkeypatch.setattr("strop.trainer.grpo.logps", lambda *_, **__: scores)
    batch = golden_batch(case["args"], scores.logps, inputs)
    found = trainer.loss(None, batch, StepCounts(14, 4))[1]
    shares = {name: float(a) / float(b) for name, (a, b) in found.items() if name.startswith("clip")}
    #  by TRL 1.16 on the same numbers
    expected = {"low_mean": 1 / 7, "high_mean": 1 / 7, "region_mean": 2 / 7, "low_min": 0.0, "high_max": 1.0}
    assert shares == pytest.approx({f"clip_ratio/{name}": value for name, value in expected.items()})


# The gradient


def gradient(trainer, experiences, cuts, layout="packed"):
    """That of a step of these experiences, cut into micro-batches of such sizes."""
    trainer.collator = dataclasses.replace(trainer.collator, layout=layout)
    batches, start = [], 0
    for size in cuts:
        batches.append(trainer.batch_of(experiences[start : start + size]))
        start += size
    trainer.model.zero_grad()
    trainer.look_ahead(batches)
    trainer.model.train()
    counts = sum((trainer.count(batch) for batch in batches), StepCounts(0, 0))
    value = 0.0
    for batch in batches:
        loss, _ = trainer.loss(trainer.model, batch, counts)
        loss.backward()
        value += loss.item()
    return value, {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def block_of(trainer):
    """The experiences of a trainer's first block."""
    trainer.meter.window.sums.clear()
    trainer._tokens_written = 0
    trainer._make_block()
    return trainer.buffer.experiences


VARIANTS = {
    **{name: {"loss_type": name} for name in LOSSES},
    "KL": {"beta": 0.1},
    "KL in rewards": {"beta": 0.1, "kl_in_reward": True, "kl_estimator": "k1"},
    "entropy": {"entropy_coef": 0.1},
    "top entropy": {"top_entropy_quantile": 0.4, "entropy_coef": 0.1},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "no truncated": {"mask_truncated_completions": True},
    "hot": {"temperature": 2.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_gradient_however_a_step_is_cut(variant, make):
    trainer = make(gradient_accumulation_steps=2, num_iterations=2, **VARIANTS[variant])
    experiences = block_of(trainer)
    for i, one in enumerate(experiences):  # as if the policy had moved
        one.old_logps = [x + 0.3 * (-1) ** (i + j) for j, x in enumerate(one.old_logps)]
    value, whole = gradient(trainer, experiences, [8])
    largest = max(g.abs().max().item() for g in whole.values())
    assert largest > 1e-5
    for cuts, layout in (([1] * 8, "packed"), ([3, 5], "packed"), ([8, 0], "packed"), ([2, 6], "padded")):
        found, parts = gradient(trainer, experiences, cuts, layout)
        assert found == pytest.approx(value, rel=1e-4, abs=1e-5)
        for name, g in whole.items():
            torch.testing.assert_close(parts[name], g, rtol=1e-4, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_groups_of_equal_rewards_can_be_left_alone_by_the_reference(loss_type, make):
    """Of two groups one is constant: the KL of the other stays, and a block of constant groups has no gradient."""

    def block(left_alone, *rewards, **config):
        trainer = make(
            loss_type=loss_type, beta=0.5, num_iterations=2, kl_on_equal_rewards=not left_alone, seed=3,
            rewards=lambda completions, **_: list(rewards), **config,
        )  # fmt: skip
        torch.manual_seed(0)
        for parameter in trainer.reference.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        return trainer, block_of(trainer)

    trainer, constant = block(True, 1.0, 1.0, 0.0, 0.0)
    assert all(g.abs().max() == 0 for g in gradient(trainer, constant, [4])[1].values())
    trainer, constant = block(False, 1.0, 1.0, 0.0, 0.0)
    assert max(g.abs().max() for g in gradient(trainer, constant, [4])[1].values()) > 1e-3
    trainer, mixed = block(True, 0.0, 1.0, 0.0, 0.0)
    found = gradient(trainer, mixed, [4])[1]
    for one in mixed[2:]:
        one.ref_logps = logps_now(trainer, one)
    for one in mixed:
        one.kl_weight = 1.0  # but the gradient of a KL to itself is 0
    for name, expected in gradient(trainer, mixed, [4])[1].items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def logps_now(trainer, experience):
    length = len(experience.token_ids) - experience.prompt_length
    own = trainer.policy_logps(trainer.batch_of([experience]))[0, :length].tolist()
    return [0.0] * experience.prompt_length + own


@pytest.mark.parametrize("loss_type", [name for name in LOSSES if name not in ("luspo", "vespo")])
def test_on_policy_the_gradient_is_reinforce(loss_type, make):
    """grad of -sum A log pi, averaged as the loss averages."""
    trainer = make(loss_type=loss_type)
    experiences = block_of(trainer)
    _, found = gradient(trainer, experiences, [4])
    batch = trainer.batch_of(experiences)
    mask = batch["completion_mask"]
    per_token = -batch["advantages"] * logps(trainer.model, batch).logps * mask
    if loss_type in ("dapo", "bnpo", "cispo"):
        loss = per_token.sum() / mask.sum()
    elif loss_type == "dr_grpo":
        loss = per_token.sum() / (len(mask) * trainer.args.max_completion_length)
    elif loss_type == "rloo":
        loss = per_token.sum() / len(mask)
    else:
        loss = (per_token.sum(-1) / mask.sum(-1)).mean()
    trainer.model.zero_grad()
    loss.backward()
    largest = max(g.abs().max().item() for g in found.values())
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4 * largest, msg=name)


def test_user_pain_4_1_the_three_means(make):
    """Rows of 2 (advantage 1), 6 (-1), 4 (1) and 1 (-1) tokens: 0, 1/13 and 1/32."""
    lengths, advantages = [2, 6, 4, 1], [1.0, -1.0, 1.0, -1.0]
    for loss_type, expected in (("grpo", 0.0), ("dapo", 1 / 13), ("dr_grpo", 1 / 32)):
        trainer = make(loss_type=loss_type, max_completion_length=8)
        experiences = block_of(trainer)
        for one, length, advantage in zip(experiences, lengths, advantages, strict=True):
            one.token_ids = one.token_ids[: one.prompt_length] + [7] * length
            one.completion_mask = [0] * one.prompt_length + [1] * length
            one.advantage, one.old_logps = advantage, None
        for cuts in ([4], [2, 2], [1, 3]):
            assert gradient(trainer, experiences, cuts)[0] == pytest.approx(expected, abs=1e-6)


def test_the_first_ratio_is_one_with_any_sampling(make):
    trainer = make(
        generator=None, temperature=0.7, top_p=0.8, top_k=40, repetition_penalty=1.1, num_iterations=2, max_steps=1
    )
    experiences = block_of(trainer)
    assert trainer.is_exact
    batch = trainer.batch_of(experiences)
    policy = logps(trainer.model.eval(), batch, temperature=0.7).logps
    inside = batch["completion_mask"].bool()
    assert (policy - batch["old_logps"])[inside].abs().max() < 1e-5


def test_a_generator_that_says_something_else_is_found_out(make):
    trainer = make(num_iterations=2, vllm_importance_sampling_correction=True)
    experiences = block_of(trainer)
    assert trainer.is_exact is False
    batch = trainer.batch_of(experiences)
    policy = logps(trainer.model.eval(), batch).logps
    torch.testing.assert_close(batch["old_logps"], policy, atol=1e-5, rtol=0)
    assert (batch["sampling_logps"][batch["completion_mask"].bool()] == -3.0).all()


def test_a_correction_that_leaves_out_most_completions_is_told(make, caplog):
    """The sampler says -3 of each token, the policy about -6, and products leave bounds the sooner the longer."""
    trainer = make(vllm_importance_sampling_correction=True, vllm_importance_sampling_clip_min=0.9, max_steps=3)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.log_history[0]["sampling/masked_ratio"] == 1
    assert caplog.text.count("vllm_importance_sampling_mode='sequence_mask' leaves out 100 %") == 1


def test_user_pain_4_5_small_differences_of_long_completions_are_told(caplog):
    """300 tokens that the policy finds 0.01 nats likelier than the sampler: by default none is trained."""
    args = GRPOConfig(output_dir="unused", use_cpu=True)
    old = torch.full((2, 300), -1.0)
    mask = torch.ones(2, 300)
    bounds = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    correction = importance_correction(old, old - 0.01, mask, args.vllm_importance_sampling_mode, *bounds)
    assert (correction == 0).all()
    log = {name: float(a) / float(b) for name, (a, b) in sampling_metrics(old, old - 0.01, mask, correction).items()}
    assert log["sampling/sampling_logp_difference/mean"] == pytest.approx(0.01, rel=1e-4)
    alarm = RolloutAlarm()
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            state = TrainerState(global_step=step, is_world_process_zero=True)
            alarm.on_log(args, state, TrainerControl(), logs={"loss": 0.0, **log})
    assert caplog.text.count("leaves out 100 % of the completions") == 1
    assert "300 tokens of 0.01 nats are a ratio of 20" in caplog.text


def test_user_pain_4_18_a_reference_far_away_is_finite_and_counted(make):
    """One token of the first completion is e^200 times as likely under the reference."""
    trainer = make(beta=0.1)
    experiences = block_of(trainer)
    first = experiences[0]
    first.ref_logps[first.prompt_length] += 200
    value, parts = gradient(trainer, experiences, [4])
    assert math.isfinite(value)
    assert all(g.isfinite().all() for g in parts.values())
    batch = trainer.batch_of(experiences)
    _, metrics = trainer.loss(trainer.model, batch, trainer.count(batch))
    assert [float(x) for x in metrics["kl_clip_ratio"]] == [1, batch["completion_mask"].sum()]
    assert math.isfinite(metrics["kl"][0])


def test_under_autocast_the_stream_writes_and_the_reference_is_the_policy(make):
    trainer = make(generator=None, bf16=True, beta=0.1, max_steps=1)
    trainer.train()
    assert trainer.generator.obstacle is None
    assert trainer.state.log_history[0]["kl"] == 0


def test_the_head_in_float32_is_the_policys_the_generators_and_the_references(make):
    trainer = make(generator=None, bf16=True, beta=0.1, cast_lm_head_to_fp32=True, max_steps=1)
    trainer.train()
    assert type(trainer.model.get_output_embeddings()) is Float32Head
    assert trainer.generator.obstacle is None
    assert trainer.state.log_history[0]["kl"] == 0


# Learning, and what is refused


def test_a_model_learns_to_say_a_word(make, bpe_tokenizer):
    wanted = bpe_tokenizer.encode("a", add_special_tokens=False)[0]

    def says_a(completion_ids, **_):
        return [ids.count(wanted) / 4 for ids in completion_ids]

    trainer = make(
        generator=None,
        rewards=says_a,
        optim="adamw_torch",
        learning_rate=0.02,
        max_steps=14,
        per_device_train_batch_size=32,
        num_generations=16,
        max_completion_length=4,
        gradient_checkpointing=False,
    )
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log and "loss" in log]
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"loss_type": "grop"}, "loss_type='grop' is unknown"),
        ({"scale_rewards": "groups"}, "scale_rewards='groups' is unknown.*Did you mean 'group'"),
        ({"importance_sampling_level": "row"}, "importance_sampling_level='row'"),
        ({"loss_type": "sapo", "epsilon": 0.1}, "epsilon=0.1 would have no effect with loss_type='sapo'"),
        ({"vespo_k_pos": 1.0}, "vespo_k_pos=1.0 would have no effect with loss_type='dapo'"),
        ({"loss_type": "cispo", "epsilon_high": 0.2}, "epsilon_high=0.2 would scale every gradient"),
        ({"loss_type": "gspo", "top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5 would have no meaning"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg=0.0 is out of range"),
        ({"loss_type": "vespo", "vespo_lambda_pos": -1.0}, "vespo_lambda_pos=-1.0 is out of range"),
        ({"delta": 1.0}, "delta=1.0 would stop every gradient"),
        ({"use_bias_correction_kl": False}, "use_bias_correction_kl=False would have no effect with beta=0"),
        (
            {"beta": 0.1, "kl_in_reward": True, "kl_estimator": "k1"}
            | {"multi_objective_aggregation": "normalize_then_sum"},
            "kl_in_reward=True would have no effect with multi_objective_aggregation",
        ),
        (
            {"beta": 0.1, "kl_in_reward": True, "kl_estimator": "k1", "use_bias_correction_kl": False},
            "use_bias_correction_kl=False would have no effect with kl_in_reward=True",
        ),
        ({"temperature": 0.0}, "temperature=0.0 always writes the same completion"),
        ({"max_completion_length": None}, "max_completion_length=None"),
        ({"sync_ref_model": True}, "beta=0 keeps none"),
        ({"kl_estimator": "k2"}, "kl_estimator='k2' would have no effect with beta=0"),
        ({"beta": 0.1, "kl_estimator": "k1"}, "expected gradient of 0"),
        ({"use_vllm": True}, "use_vllm=True needs a generator on vLLM"),
        ({"vllm_mode": "server"}, "vllm_mode='server' would have no effect with use_vllm=False"),
        ({"num_generations": 1}, "num_generations=1 is too few"),
        ({"num_generations": None}, "num_generations=None is too few"),
        (
            {"num_generations": 3},
            "8 completions per step; need a multiple of 3; e.g. gradient_accumulation_steps=3 or num_gen",
        ),
        ({"generation_kwargs": {"num_beams": 2}}, "'num_beams'; known are"),
        ({"entropy_target": 0.5}, "entropy_target=0.5 would have no effect with use_adaptive_entropy=False"),
        ({"vllm_importance_sampling_mode": "rows"}, "vllm_importance_sampling_mode='rows' is unknown"),
        ({"advantage_type": "opo", "scale_rewards": "none"}, "scale_rewards='none' would have no effect"),
        ({"num_completions_to_print": 3}, "log_completions=False"),
        ({"overlong": "drop"}, "max_prompt_length=None"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"kl_on_equal_rewards": False}, "kl_on_equal_rewards=False would have no effect with beta=0"),
        ({"dynamic_sampling_reward": "f"}, "dynamic_sampling_reward='f' would have no effect with dynamic_sampling_r"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**{"output_dir": "unused", "use_cpu": True} | config)


def test_a_correction_without_another_sampler_is_refused(make):
    with pytest.raises(ValueError, match=r"vllm_importance_sampling_clip_max=2\.0 would have no effect"):
        make(generator=None, vllm_importance_sampling_clip_max=2.0)


def test_old_names_and_what_is_derived():
    config = GRPOConfig(output_dir="unused", use_cpu=True, max_new_tokens=32, gradient_accumulation_steps=4)
    assert config.max_completion_length == 32
    assert (config.steps_per_generation, config.generation_batch_size) == (4, 32)
    assert dataclasses.replace(config, learning_rate=1.0).generation_batch_size == 32
    assert GRPOConfig(output_dir="unused", use_cpu=True, scale_rewards=False).scale_rewards == "none"
    assert config.loss_options == {}


def test_no_reward_is_refused(make):
    with pytest.raises(ValueError, match="there is no reward"):
        make(rewards=None)
    with pytest.raises(ValueError, match=r"reward_weights=.* are 2, but there are 1 reward functions"):
        make(reward_weights=[1.0, 2.0])
