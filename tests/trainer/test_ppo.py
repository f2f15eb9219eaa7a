"""PPO: rewards of tokens, advantages and their loss; who is trained, and when."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig

from strop.callbacks.bema import BEMACallback
from strop.losses.reduce import StepCounts
from strop.models import attention
from strop.models.logps import logps
from strop.models.segments import Segments
from strop.models.values import critic_of, values, without_critic
from strop.rollout.types import Rollout
from strop.trainer.ppo import PPOConfig, PPOTrainer

from .conftest import Run, Scripted, vowels

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "advantages.json").read_text())
KINDS = ("shared", "separate", "reward")


@pytest.fixture
def make(make_rollout_trainer, tiny_llama, bpe_tokenizer):
    """`make(value_function="shared", **config)`: a PPOTrainer of one completion a prompt."""

    def build(**config) -> PPOTrainer:
        more = dict(config.pop("more", {}))
        if config.get("value_function") == "reward":
            more["reward_model"] = reward_model(tiny_llama)
        return make_rollout_trainer(PPOTrainer, **{"num_generations": 1, "more": more} | config)

    return build


def reward_model(tiny_llama, num_labels=1):
    config = copy.deepcopy(tiny_llama.config)
    config.num_labels = num_labels
    torch.manual_seed(1)
    return AutoModelForSequenceClassification.from_config(config)


def spoken(trainer, seed=0):
    """The value function says something from the start."""
    torch.manual_seed(seed)
    name, critic = critic_of(trainer.model)
    for key, parameter in critic.named_parameters():
        if name == "value_head" or key.startswith("score"):
            torch.nn.init.normal_(parameter, std=0.1)
    return trainer


def rollout(scores, mask=None, old_values=None, old_logps=None, ref_logps=None, ended=True) -> Rollout:
    """One of a prompt of one token; lists have one entry a token after it."""
    length = len(next(x for x in (mask, old_values, old_logps) if x is not None))
    zeros = [0.0] * length
    lists = {"old_values": old_values, "old_logps": old_logps, "ref_logps": ref_logps}
    return Rollout(
        row={},
        token_ids=[5] * (length + 1),
        completion_mask=[0, *(mask or [1] * length)],
        logps=[0.0, *zeros],
        finish_reason="stop" if ended else "length",
        rewards={"vowels": scores},
        prompt_length=1,
        **{name: [0.0, *(zeros if x is None else x)] for name, x in lists.items()},
    )


# Rewards and advantages


@pytest.mark.parametrize(
    ("mask", "gamma", "expected"),
    [
        ([1, 1, 1, 0, 0], 1.0, [1, 1, 1, 0, 0]),  # the score is at the last token, and nothing behind it
        ([1, 0, 0, 1], 0.9, [0.9, 0, 0, 1]),  # what a tool wrote takes no time: 0.9 and not 0.729
    ],
)
def test_the_score_on_its_way_back(make, mask, gamma, expected):
    trainer = make(gamma=gamma, lam=1.0, whiten_advantages=False)
    one = rollout(1.0, mask)
    assert trainer.advantages([one], 1)[0].tolist() == pytest.approx(expected)
    trainer._finish([one], 1)
    assert one.token_advantages == pytest.approx([0, *expected]) == one.returns


def test_masked_tokens_stay_out_of_the_statistics(make):
    trainer = make(gamma=0.9, lam=1.0)
    one, other = rollout(1.0, [1, 0, 0, 1]), rollout(-1.0, [1, 1])
    trainer._finish([one, other], 1)
    found = torch.tensor([one.token_advantages[i] for i in (1, 4)] + other.token_advantages[1:])
    raw = torch.tensor([0.9, 1.0, -0.9, -1.0])
    torch.testing.assert_close(found, (raw - raw.mean()) / raw.std(), rtol=1e-6, atol=1e-6)
    assert one.token_advantages[2:4] == [0, 0]


def test_the_penalty_is_subtracted_where_the_end_is_missing(make):
    trainer = make(missing_eos_penalty=1.0)
    cut_off, ended = rollout(0.7, [1, 1], ended=False), rollout(0.7, [1, 1])
    assert trainer.scores([cut_off, ended]).tolist() == pytest.approx([-0.3, 0.7])


@pytest.mark.parametrize("case", GOLDENS["ppo_cases"], ids=lambda c: f"{c['kl_estimator']}-{c['whiten_rewards']}")
def test_the_numbers_of_trl(make, case):
    """From rollouts to advantages and returns, where no row is padded."""
    names = ("kl_estimator", "whiten_rewards", "gamma", "lam", "kl_coef")
    trainer = make(**{name: case[name] for name in names})
    given = GOLDENS["ppo"]
    rows = zip(case["scores"], given["values"], given["logprobs"], given["ref_logprobs"], strict=True)
    rollouts = [rollout(score, None, *lists) for score, *lists in rows]
    trainer._finish(rollouts, 1)
    for one, advantages, returns in zip(rollouts, case["advantages"], case["returns"], strict=True):
        assert one.token_advantages[1:] == pytest.approx(advantages, abs=1e-6)
        assert one.returns[1:] == pytest.approx(returns, abs=1e-6)


@pytest.mark.parametrize("case", GOLDENS["ppo_stopped"]["cases"])
def test_the_numbers_of_trl_where_answers_end_early(make, case):
    """Scores and divergences of all; returns of those without padding, on whose first TRL puts the score."""
    stopped, given = GOLDENS["ppo_stopped"], GOLDENS["ppo"]
    names = ("kl_estimator", "gamma", "lam", "kl_coef", "missing_eos_penalty")
    trainer = make(**{name: case[name] for name in names})
    lengths = [last + 1 for last in case["sequence_lengths"]]
    rollouts = []
    for i, length in enumerate(lengths):
        lists = [given[name][i][:length] for name in ("values", "logprobs", "ref_logprobs")]
        ended = stopped["eos_token_id"] in stopped["responses"][i][:length]
        rollouts.append(rollout(stopped["scores"][i], None, *lists, ended=ended))
    assert trainer.scores(rollouts).tolist() == pytest.approx(case["scores_after_penalty"], abs=1e-6)
    trainer._finish(rollouts, 1)
    for length, found, expected in zip(lengths, trainer.kl(rollouts).tolist(), case["kl"], strict=True):
        assert found[:length] == pytest.approx(expected[:length], abs=1e-9)
    whole = [i for i, length in enumerate(lengths) if length == max(lengths)]
    assert len(whole) == 3
    for i in whole:
        assert rollouts[i].returns[1:] == pytest.approx(case["returns"][i], abs=1e-6)


def test_entropy_is_over_real_tokens(make):
    """-0.5, -1.0 and -0.2: surprises of 1.5 and 0.2, on average 0.85."""
    trainer = make()
    rollouts = [rollout(1.0, old_logps=[-0.5, -1.0]), rollout(1.0, old_logps=[-0.2])]
    trainer._finish(rollouts, 1)
    assert [one.metrics["objective/entropy"] for one in rollouts] == [(1.5, 1.0), (0.2, 1.0)]


def test_what_can_not_be_judged_trains_nothing(make):
    def sometimes(completions, **_):
        return [None if i % 2 else value for i, value in enumerate(vowels(completions))]

    trainer = make(rewards=sometimes, max_steps=1)
    trainer._make_block()
    masks = [sum(one.completion_mask) for one in trainer.buffer.experiences]
    assert masks[0]
    assert masks[2]
    assert not masks[1]
    assert not masks[3]
    assert all(map(math.isfinite, trainer.buffer.experiences[1].advantages))


# What is trained


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_step_is_one_however_it_is_cut(make, kind):
    """4 x 1 = 1 x 4, packed = padded, of policy and values; and in two mini-batches as well."""

    def weights(**config):
        trainer = spoken(make(value_function=kind, max_grad_norm=1e9, **config))
        trainer.train()
        return Run(trainer)

    common = {"num_ppo_epochs": 2, "num_mini_batches": 2, "max_steps": 3}
    whole = weights(**common)
    for cut in (
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"layout": "padded", "local_rollout_forward_batch_size": 3},
    ):
        other = weights(**common | cut)
        for name, weight in whole.weights.items():
            torch.testing.assert_close(other.weights[name], weight, rtol=1e-5, atol=1e-6)
        for one, two in zip(whole.logs, other.logs, strict=True):
            untimed = lambda log: {k: v for k, v in log.items() if k not in ("eps", "step_time")}  # noqa: E731
            assert untimed(one) == pytest.approx(untimed(two), rel=1e-4, abs=1e-5)


def test_a_block_has_one_gradient(make):
    """Whole and in parts, with and without checkpointing, of whole weights and of an adapter's."""
    trainer = spoken(make(value_function="shared"))
    trainer._make_block()
    experiences = trainer.buffer.experiences

    def gradients(parts):
        trainer.model.zero_grad()
        batches = [trainer.ready_batch_of(part) for part in parts]
        counts = sum((trainer.count(batch) for batch in batches), StepCounts(0, 0))
        trainer.model.train()
        for batch in batches:
            trainer.loss(trainer.model, batch, counts)[0].backward()
        return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}

    def compare():
        whole = gradients([experiences])
        assert max(grad.abs().max() for grad in whole.values()) > 1e-3
        found = [gradients([experiences[:1], experiences[1:]])]
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        found.append(gradients([experiences]))
        trainer.model.gradient_checkpointing_disable()
        for one in found:
            for name, grad in one.items():
                torch.testing.assert_close(grad, whole[name], rtol=1e-4, atol=1e-6, msg=name)

    compare()
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    with without_critic(trainer.model):
        trainer.model = get_peft_model(trainer.model, config)
    compare()


@pytest.mark.parametrize("kind", KINDS)
def test_value_pretraining_leaves_the_policy(make, kind):
    options = {"optim": "adamw_torch", "weight_decay": 0.1, "max_grad_norm": 1.0, "learning_rate": 1e-2}
    trainer = make(value_function=kind, num_value_pretraining_steps=3, max_steps=3, num_ppo_epochs=2, **options)
    with without_critic(trainer.model):
        before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    critic = {name: p.clone() for name, p in critic_of(trainer.model)[1].named_parameters()}
    trainer.train()
    with without_critic(trainer.model):
        assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert any(not torch.equal(p, critic[name]) for name, p in critic_of(trainer.model)[1].named_parameters())
    trainer.args.max_steps = 6
    trainer.args.num_value_pretraining_steps = 0
    trainer.remove_callback(next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "ValuesFirst"))
    trainer.train()
    with without_critic(trainer.model):
        assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_value_pretraining_goes_back_through_values_alone(make):
    trainer = spoken(make(num_value_pretraining_steps=3))
    trainer._make_block()
    batch = trainer.ready_batch_of(trainer.buffer.experiences)
    trainer.loss(trainer.model, batch, trainer.count(batch))[0].backward()
    assert {name for name, p in trainer.model.named_parameters() if p.grad is not None} == {
        "value_head.weight",
        "value_head.bias",
    }


@pytest.mark.parametrize("trunk", ["policy", "values"])
def test_both_trunks_are_compared_in_two_layouts(make, monkeypatch, trunk):
    """One that mixes rows is enough for rows to be padded."""
    trainer = make(value_function="separate")
    critic = critic_of(trainer.model)[1]

    def attend(query, key, value, segments, scores):
        whole = Segments((segments.num_tokens,), (-1,))
        return over_pieces(query, key, value, whole if inside["values"] == (trunk == "values") else segments, scores)

    inside, over_pieces = {"values": False}, attention.attend_in_pieces
    critic.model.register_forward_pre_hook(lambda *_: inside.update(values=True))
    critic.model.register_forward_hook(lambda *_: inside.update(values=False))
    monkeypatch.setattr(attention, "attend_in_pieces", attend)
    trainer._make_block()
    assert "segments" not in trainer.ready_batch_of(trainer.buffer.experiences)
    assert trainer.layout_guard.is_trusted == (trunk == "values")


def test_the_divergence_is_steered(make):
    """e = clip(kl / target - 1, -0.2, 0.2); kl_coef is multiplied by 1 + e n / horizon."""
    trainer = make(target_kl=2.0, kl_horizon=40, kl_coef=0.1)
    far = rollout(1.0, old_logps=[-1.0, -1.0], ref_logps=[-3.5, -3.5])  # 5 nats
    trainer._finish([far, far], 1)
    assert trainer.controller.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 40))
    assert far.metrics["kl_coef"] == (0.1, 1.0)
    near = rollout(1.0, old_logps=[-1.0], ref_logps=[-2.9])  # 1.9 nats
    coef = trainer.controller.coef
    trainer._finish([near], 1)
    assert trainer.controller.coef == pytest.approx(coef * (1 - 0.05 / 40))
    trainer._is_evaluating = True
    trainer._finish([far], 1)
    assert trainer.controller.coef == pytest.approx(coef * (1 - 0.05 / 40))


def test_an_adapter_is_trained_against_itself_switched_off(make, tiny_llama):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    trainer = make(more={"peft_config": config}, max_steps=4, num_ppo_epochs=2, learning_rate=0.5)
    trainer.train()
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert any("lora_B" in name for name in trained)
    assert any("value_head" in name for name in trained)
    assert all("lora_" in name or "value_head" in name for name in trained)
    assert critic_of(trainer.model)[1].weight.any()
    batch = trainer.ready_batch_of(trainer.buffer.experiences)
    own = copy.deepcopy(tiny_llama).eval()
    own.set_attn_implementation(trainer.model.config._attn_implementation)
    expected = logps(own, batch, temperature=batch["temperature"]).logps
    torch.testing.assert_close(trainer.reference.logps(batch), expected, rtol=1e-5, atol=1e-5)


def test_the_reward_rises(make):
    def low(completion_ids, **_):
        return [sum(token < 200 for token in ids) / 4 for ids in completion_ids]

    options = {"optim": "adamw_torch", "learning_rate": 0.02, "max_grad_norm": 1.0, "num_ppo_epochs": 2}
    options |= {"per_device_train_batch_size": 32, "response_length": 4, "max_completion_length": None}
    trainer = make(generator=None, rewards=low, max_steps=20, kl_coef=0.01, temperature=1.0, **options)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "objective/scores" in log]
    assert logs[0]["objective/scores"] < 0.6
    assert logs[-1]["objective/scores"] > 0.85


# Metrics


def test_no_metric_is_impossible(make):
    trainer = make(
        generator=None, num_ppo_epochs=3, max_steps=9, learning_rate=2.0, kl_estimator="k3", value_function="separate"
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 9
    for log in logs:
        assert log["policy/entropy_avg"] >= 0
        assert log["policy/approxkl_avg"] >= 0
        assert log["val/ratio_var"] >= 0
        for name in ("policy/clipfrac_avg", "val/clipfrac_avg"):
            assert 0 <= log[name] <= 1
        assert log["episode"] in (4, 8, 12)
        assert log["lr"] == 2.0
        assert log["eps"] > 0
    blocks = [log for log in logs if "objective/kl" in log]
    assert len(blocks) == 3
    for log in blocks:
        assert log["objective/kl"] >= 0
        assert log["objective/entropy"] >= 0
        assert log["objective/rlhf_reward"] == pytest.approx(
            log["objective/scores"] + log["objective/non_score_reward"]
        )
        assert log["objective/non_score_reward"] == pytest.approx(-0.05 * log["objective/kl"], rel=1e-4, abs=1e-6)
        assert 0 <= log["val/num_eos_tokens"] <= 4
        assert log["val/explained_variance"] <= 1
        assert "frac_reward_zero_std" not in log
    assert logs[0]["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert max(log["policy/clipfrac_avg"] for log in logs) > 0


def test_an_evaluation_generates_and_trains_nothing(make, prompts):
    trainer = make(more={"eval_dataset": prompts}, target_kl=1.0, generator=None)
    before = copy.deepcopy(trainer.model.state_dict())
    found = trainer.evaluate()
    assert found["eval_objective/scores"] == pytest.approx(found["eval_reward"])
    assert found["eval_val/ratio"] == pytest.approx(1, abs=1e-5)
    assert found["eval_objective/kl"] == pytest.approx(0, abs=1e-4)
    assert found == {**trainer.evaluate(), **{k: v for k, v in found.items() if "time" in k or "second" in k}}
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.controller.coef == 0.05


def test_equal_returns_explain_nothing(make):
    """The variance of rounding is none."""
    trainer = make(kl_coef=0.0, lam=1.0)
    rollouts = [rollout(0.1, old_values=row) for row in torch.randn(3, 9, dtype=torch.float64).tolist()]
    trainer._finish(rollouts, 1)
    assert len({x for one in rollouts for x in one.returns[1:]}) > 1
    assert "val/explained_variance" not in trainer.measured_rewards(rollouts, 1)


# Who is who


def test_the_july_call_by_position(tiny_llama, bpe_tokenizer, tmp_path):
    """args, tokenizer, model, reference, reward model, rows of tokens, value model."""
    rows = Dataset.from_list([{"input_ids": bpe_tokenizer(text).input_ids} for text in ("What is ice?", "Why?")])
    args = PPOConfig(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=2, response_length=4, max_steps=1,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    reward, value = reward_model(tiny_llama), reward_model(tiny_llama)
    reference = copy.deepcopy(tiny_llama)
    trainer = PPOTrainer(args, bpe_tokenizer, tiny_llama, reference, reward, rows, value)
    assert trainer.reference.model is reference
    assert critic_of(trainer.model)[1] is value
    assert trainer.reward_names == ["LlamaForSequenceClassification"]
    trainer.train()
    assert not any(p.requires_grad for p in reward.parameters())
    assert all(p.requires_grad for p in value.parameters())


def test_which_value_function(make, tiny_llama):
    auto = make()
    assert critic_of(auto.model)[0] == "value_head"
    reward = reward_model(tiny_llama)
    with_model = make(more={"reward_model": reward})
    name, critic = critic_of(with_model.model)
    assert name == "value_model"
    assert critic is not reward
    assert torch.equal(critic.score.weight, reward.score.weight)
    assert critic_of(make(more={"reward_model": reward}, value_function="shared").model)[0] == "value_head"
    same = make(more={"reward_model": reward, "value_model": reward})
    assert critic_of(same.model)[1] is not reward
    own = make(value_function="separate")
    torch.testing.assert_close(critic_of(own.model)[1].model.norm.weight, own.model.model.norm.weight)
    rough = make(more={"reward_model": copy.deepcopy(reward).bfloat16()})
    assert {p.dtype for p in critic_of(rough.model)[1].parameters()} == {torch.float32}


def test_a_reward_model_that_reads_whole_texts_has_no_values_of_tokens(make, make_rollout_trainer):
    config = BertConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_labels=1
    )
    encoder = AutoModelForSequenceClassification.from_config(config)
    assert critic_of(make(more={"reward_model": encoder}).model)[0] == "value_head"
    for options in (
        {"value_function": "reward", "more": {"reward_model": encoder}},
        {"more": {"value_model": encoder}},
    ):
        with pytest.raises(ValueError, match="its values would know what comes later"):
            make_rollout_trainer(PPOTrainer, num_generations=1, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"more": {"data_collator": list}}, "data_collator=type would have no effect"),
        ({"value_function": "reward", "more": {"reward_model": None}}, "there is none; take"),
        ({"more": {"ref_model": 1}, "kl_coef": 0.0}, "ref_model would have no effect with kl_coef=0"),
        ({"value_function": "shared", "more": {"value_model": 1}}, "value_model would have no effect"),
        ({"rewards": None}, "there is no reward"),
        (
            {"more": {"reward_model": vowels}},
            "reward_model=.* is a function, but a reward model is",
        ),
        ({"more": {"reward_model": torch.nn.Linear(2, 1)}}, "Linear is no model of transformers"),
        ({"reward_model_path": "accuracy"}, "'accuracy' is neither a folder"),
        ({"stop_token_id": 400}, "stop_token_id=400 would have no effect, as the model writes tokens 0 to 399"),
    ],
)
def test_contradictions_are_refused(make_rollout_trainer, options, told):
    with pytest.raises(ValueError, match=told):
        make_rollout_trainer(PPOTrainer, **options)
    with pytest.raises(ValueError, match="there is no model to train"):
        PPOTrainer(reward_funcs=vowels, train_dataset=[])


def test_steps_can_be_overridden_one_by_one(make_rollout_trainer):
    seen = []

    class Mine(PPOTrainer):
        def generate(self, rows, numbers, sampling):
            seen.append("generate")
            return super().generate(rows, numbers, sampling)

        def score(self, rollouts):
            seen.append("score")
            for one in rollouts:
                one.rewards = {"vowels": float(one.length)}

        def advantages(self, rollouts, group):
            seen.append("advantages")
            return 2 * super().advantages(rollouts, group)

        def loss(self, model, batch, counts):
            seen.append("loss")
            return super().loss(model, batch, counts)

    trainer = make_rollout_trainer(Mine, max_steps=1, whiten_advantages=False, lam=1.0, kl_coef=0.0)
    trainer.train()
    assert seen == ["generate", "score", "advantages", "loss"]
    one = trainer.buffer.experiences[0]
    assert one.returns[-1] == one.advantages[-1] == 2 * sum(one.completion_mask)


def test_tokens_of_others_are_no_steps(make):
    """A rollout function's tokens under a 0 of `env_mask` have neither values nor advantages, and count nowhere."""

    def play(prompts, trainer):
        return {
            "prompt_ids": [[5, 6, 7] for _ in prompts],
            "completion_ids": [[10 + i, 11, 12, 13] for i, _ in enumerate(prompts)],
            "logprobs": [[-1.0] * 4 for _ in prompts],
            "env_mask": [[1, 0, 0, 1] for _ in prompts],
        }

    trainer = spoken(make(more={"rollout_func": play}, max_steps=1, gamma=0.9))
    trainer._make_block()
    for one in trainer.buffer.experiences:
        for stream in (one.advantages, one.returns, one.old_values):
            assert [bool(x) for x in stream[3:]] == [True, False, False, True]
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["completions/mean_length"] == 2


def test_a_stop_token_ends_what_a_function_plays(make):
    def play(prompts, trainer):
        ids = [[10, 11, 33 if i % 2 else 12] for i, _ in enumerate(prompts)]
        return {"prompt_ids": [[5, 6, 7] for _ in prompts], "completion_ids": ids, "logprobs": None}

    trainer = make(more={"rollout_func": play}, stop_token_id=33, missing_eos_penalty=1.0, max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["val/num_eos_tokens"] == 2
    assert log["objective/scores"] == pytest.approx(log["reward"] - 0.5)


# On disk


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_policy_is_a_plain_model(make, kind, tmp_path):
    trainer = spoken(make(value_function=kind, save_strategy="steps", save_steps=1, output_dir=str(tmp_path)))
    trainer.train()
    trainer.save_model()
    batch = trainer.ready_batch_of(trainer.buffer.experiences)
    expected = values(trainer.model, batch)
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        with without_critic(trainer.model):
            for name, weight in trainer.model.state_dict().items():
                assert torch.equal(weight, model.state_dict()[name]), name
    if kind != "shared":
        again = make(more={"value_model": str(tmp_path / "value_model")})
        torch.testing.assert_close(values(again.model, batch), expected)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_averaged_weights_and_a_moving_reference_are_of_the_policy(make, kind, tmp_path):
    options = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0, "value_function": kind}
    trainer = make(more={"callbacks": [BEMACallback(update_freq=1)]}, output_dir=str(tmp_path), **options)
    trainer.train()
    with without_critic(trainer.model):
        policy = trainer.model.state_dict()
    assert all(torch.equal(weight, policy[name]) for name, weight in trainer.reference.model.state_dict().items())
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "bema", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_only_the_completions_of_a_scripted_generator(make):
    trainer = make(max_steps=8, num_ppo_epochs=2)
    trainer.train()
    assert isinstance(trainer.generator, Scripted)
    assert trainer.generator.numbers == list(range(16))
