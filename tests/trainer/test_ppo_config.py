"""Settings of PPO: TRL's names and defaults, sizes that can be predicted, contradictions refused."""

import dataclasses

import pytest

from strop.trainer.ppo import PPOConfig


def make(**options) -> PPOConfig:
    return PPOConfig(output_dir="unused", use_cpu=True, **options)


def test_defaults_are_trls():
    expected = {
        **{"learning_rate": 3e-6, "num_ppo_epochs": 4, "num_mini_batches": 1, "total_episodes": None},
        **{"response_length": 53, "temperature": 0.7, "stop_token": None, "stop_token_id": None},
        **{"missing_eos_penalty": None, "kl_coef": 0.05, "kl_estimator": "k1", "cliprange": 0.2, "vf_coef": 0.1},
        **{"cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95, "whiten_rewards": False, "num_sample_generations": 10},
        **{"local_rollout_forward_batch_size": 64, "dataset_num_proc": None, "num_generations": 1},
    }
    config = make()
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "other", "value"),
    [
        ("kl_coef", "beta", 0.3),
        ("cliprange", "epsilon", 0.1),
        ("num_ppo_epochs", "num_iterations", 2),
        ("response_length", "max_completion_length", 7),
    ],
)
def test_two_names_of_one_option(name, other, value):
    for given in (name, other):
        config = make(**{given: value})
        assert getattr(config, name) == getattr(config, other) == value
    with pytest.raises(ValueError, match=f"{name}=.* and {other}=.* contradict each other"):
        make(**{name: value, other: value + 1})


@pytest.mark.parametrize("given", [{}, {"kl_coef": 0.3}, {"beta": 0.3}])
def test_a_replaced_config_follows_what_is_new(given):
    """Either name of an option, sizes and steps."""
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_mini_batches": 4}
    config = make(total_episodes=33, num_ppo_epochs=2, **sizes, **given)
    assert config.max_steps == 24
    for name in ("kl_coef", "beta"):
        other = dataclasses.replace(config, **{name: 0.7})
        assert (other.kl_coef, other.beta, other.max_steps) == (0.7, 0.7, 24)
    assert dataclasses.replace(config).kl_coef == config.kl_coef == given.get("kl_coef", given.get("beta", 0.05))
    assert dataclasses.replace(config, total_episodes=16).max_steps == 8
    assert dataclasses.replace(config, num_ppo_epochs=1).max_steps == 12
    assert dataclasses.replace(config, max_steps=5).max_steps == 5
    other = dataclasses.replace(config, num_mini_batches=2)
    assert (other.per_device_train_batch_size, other.steps_per_generation, other.max_steps) == (8, 2, 12)
    assert dataclasses.replace(config, per_device_train_batch_size=4).generation_batch_size == 8
    assert all(type(value) in (int, float) for name, value in config.to_dict().items() if name in (*sizes, "kl_coef"))
    with pytest.raises(ValueError, match=r"kl_coef=1\.0 and beta=2\.0 contradict"):
        dataclasses.replace(config, kl_coef=1.0, beta=2.0)


def test_the_name_of_other_trainers_warns():
    with pytest.warns(FutureWarning, match="max_new_tokens"):
        assert make(max_new_tokens=9).response_length == 9


@pytest.mark.parametrize(
    ("size", "accumulation", "parts", "expected"),
    [
        (8, 1, 1, (8, 1, 1)),
        (8, 4, 1, (8, 4, 4)),
        (8, 4, 2, (8, 2, 4)),  # two optimizer steps of two micro-batches
        (8, 1, 4, (2, 1, 4)),
        (8, 2, 4, (4, 1, 4)),
        (6, 3, 2, (3, 3, 6)),  # 9 of 18 a step, in micro-batches of at most 6 that divide them
        (1, 4, 4, (1, 1, 4)),
    ],
)
def test_a_batch_of_rollouts_is_cut_into_mini_batches(size, accumulation, parts, expected):
    config = make(per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, num_mini_batches=parts)
    sizes = lambda c: (c.per_device_train_batch_size, c.gradient_accumulation_steps, c.steps_per_generation)  # noqa: E731
    assert sizes(config) == expected
    assert config.plan(1).completions_per_block == size * accumulation
    again = dataclasses.replace(config)
    assert sizes(again) == expected
    assert again.generation_batch_size == size * accumulation


def test_total_episodes_are_rounded_up_to_whole_batches():
    common = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_mini_batches": 4}
    #  33 episodes are 3 batches of 16, each in 4 steps, twice
    assert make(total_episodes=33, num_ppo_epochs=2, **common).max_steps == 24
    assert make(total_episodes=33, max_steps=5, **common).max_steps == 5


def test_the_seed_snippet_of_64_a_device():
    config = make(per_device_train_batch_size=64, total_episodes=10000)
    assert config.max_steps == 157 * 4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_mini_batches": 3}, "num_mini_batches=3 doesn't divide the 8 completions .* take one of 1, 2, 4, 8"),
        ({"steps_per_generation": 4}, "steps_per_generation=4 .* aren't num_mini_batches=1 optimizer steps"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty=-1.0 would reward completions that are cut off"),
        ({"stop_token": "eos", "stop_token_id": 3}, "stop_token='eos' and stop_token_id=3 are both given"),
        ({"stop_token": "period"}, "stop_token='period' is unknown"),
        ({"kl_estimator": "k4"}, "kl_estimator='k4' is unknown; choose one of k1, k2, k3"),
        ({"target_kl": 6.0, "kl_coef": 0.0}, "target_kl=6.0 can't be held by kl_coef=0"),
        ({"kl_horizon": 5}, "kl_horizon=5 would have no effect with target_kl=None"),
        ({"value_function": "both"}, "value_function='both' is unknown"),
        ({"gamma": 1.1}, "gamma=1.1 is out of range"),
        ({"dynamic_sampling_rounds": 1}, "dynamic_sampling_rounds=1 would have no effect with PPO"),
        ({"replay_buffer_size": 1}, "replay_buffer_size=1 would have no effect with PPO"),
        ({"vf_coef": 0.0, "num_value_pretraining_steps": 1}, "num_value_pretraining_steps=1 would have no effect"),
        ({"num_generations": 0}, "num_generations=0 is out of range; it must be at least 1"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0 is out of range"),
        ({"num_ppo_epochs": 0}, "num_ppo_epochs=0 is out of range"),
        ({"response_length": 0}, "response_length=0 is out of range"),
        ({"mini_batch_size": 4}, "PPOConfig has no option 'mini_batch_size' any more: sizes follow from"),
    ],
)
def test_contradictions_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        make(**{"per_device_train_batch_size": 8} | options)


def test_stop_token_id_ends_completions():
    assert make(stop_token_id=7).sampling.stop_token_ids == (7,)
    assert make(stop_token="eos").sampling.stop_token_ids == ()
