"""Which prompts are asked when, what is kept of rollouts, and what an evaluation leaves alone."""

import functools
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset, IterableDataset

from strop.rollout.types import Completion
from strop.trainer.grpo import GRPOTrainer


@pytest.fixture
def make(make_rollout_trainer):
    return functools.partial(make_rollout_trainer, GRPOTrainer, vllm_importance_sampling_correction=False)


def rows(count):
    return Dataset.from_list([{"prompt": f"What is {i}?"} for i in range(count)])


def by_length(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def steps(trainer):
    return [log for log in trainer.state.log_history if "loss" in log]


# Which prompts


@pytest.mark.parametrize(("count", "iterations", "num_steps"), [(24, 1, 8), (24, 2, 16), (25, 1, 9)])
def test_every_prompt_is_asked_once_an_epoch(make, count, iterations, num_steps):
    trainer = make(
        rows=rows(count),
        per_device_train_batch_size=6,
        steps_per_generation=4,
        num_iterations=iterations,
        max_steps=-1,
        num_train_epochs=1,
    )
    assert trainer.batch_plan().steps_per_epoch == num_steps
    trainer.train()
    assert trainer.state.global_step == num_steps
    assert Counter(Counter(trainer.generator.asked).values()) == {2: count}
    assert trainer.generator.numbers == list(range(2 * count))


def test_a_group_has_the_first_to_the_last_of_its_prompts_rows(make):
    asked = []

    def reward(prompts, word, completions, **_):
        asked.append((prompts, word))
        return [float(len(c)) for c in completions]

    make(rewards=reward, shuffle_dataset=False, max_steps=1).train()
    (prompts, words), *_ = asked
    assert words == ["blue", "blue", "hot", "hot"]
    assert prompts == [f"What is {word}?" for word in words]


def test_a_stream_is_asked_in_order(make, bpe_tokenizer):
    stream = IterableDataset.from_generator(lambda: ({"prompt": f"What is {i}?"} for i in range(6)))
    trainer = make(rows=stream, shuffle_dataset=False, max_steps=4)
    trainer.train()
    texts = bpe_tokenizer.batch_decode(trainer.generator.asked)
    assert [int(text[8]) for text in texts] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 0, 1, 1]


def test_fewer_prompts_than_a_block_are_trained_all_the_same(make):
    trainer = make(rows=rows(1), per_device_train_batch_size=8, num_generations=4, max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3
    assert len(trainer.generator.asked) == 12


def test_long_prompts_by_ids(make, bpe_tokenizer):
    long = "What is " + "blue " * 20
    data = Dataset.from_list([{"prompt": long}, {"prompt": "What?"}])
    trainer = make(rows=data, max_prompt_length=5, shuffle_dataset=False, max_steps=1)
    trainer.train()
    assert trainer.generator.asked[0] == tuple(bpe_tokenizer(long).input_ids[-5:])
    assert len(make(rows=data, max_prompt_length=5, overlong="drop").train_dataset) == 1
    with pytest.raises(ValueError, match="more than max_prompt_length=5"):
        make(rows=data, max_prompt_length=5, overlong="error")


def test_messages_and_template_arguments_of_a_row(make, bpe_tokenizer):
    messages = [{"role": "user", "content": "Is ice hot?"}]
    seen = []

    def reward(prompts, completions, **_):
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0, 1.0] * 2

    trainer = make(rows=Dataset.from_list([{"prompt": messages}] * 2), rewards=reward, max_steps=1)
    trainer.train()
    expected = bpe_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert trainer.generator.asked[0] == tuple(expected)
    assert seen[0][0] == messages
    assert [message["role"] for message in seen[0][1]] == ["assistant"]


# Rewards


def test_rows_that_no_reward_applies_to_are_part_of_no_baseline(make, caplog):
    def some(completions, **_):
        return [1.0, 0.0, None, None]

    def others(completions, **_):
        return [None, None, 2.0, None]

    trainer = make(rewards=[some, others], num_generations=4, max_steps=1)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    log = steps(trainer)[0]
    assert log["reward"] == 1.0
    assert log["rewards/some/mean"] == 0.5
    assert log["rewards/others/mean"] == 2.0
    assert "no reward applies to 1 of 4 completions" in caplog.text
    assert [one.advantage for one in trainer.buffer.experiences] == pytest.approx([0.0, -0.9999, 0.9999, 0.0], abs=1e-4)


def test_what_reward_functions_log(make):
    def reward(completions, log_extra, log_metric, **_):
        log_extra("size", [len(c) for c in completions])
        log_metric("share", 0.25)
        return by_length([list(c) for c in completions])

    trainer = make(rewards=reward, max_steps=1)
    trainer.train()
    assert steps(trainer)[0]["share"] == 0.25
    lines = written(trainer)
    assert all(line["size"] == len(line["completion"]) for line in lines)


def written(trainer):
    files = sorted(Path(trainer.args.output_dir).glob("rollouts/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_every_rollout_is_on_disk(make):
    trainer = make(num_generations=4, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2)
    trainer.train()
    lines = written(trainer)
    assert [line["step"] for line in lines] == [1] * 8 + [2] * 8
    assert set(lines[0]) == {"step", "prompt", "completion", "vowels", "advantage", "truncated"}
    assert sum(line["truncated"] for line in lines[:8]) / 8 == steps(trainer)[0]["completions/clipped_ratio"]


def test_completions_are_printed_when_asked_for(make, capsys):
    make(log_completions=True, num_completions_to_print=2, max_steps=1).train()
    shown = capsys.readouterr().out
    assert "completions at step 1" in shown
    assert shown.count("What is") == 2


def test_lengths_are_those_of_what_was_written_masked_or_not(make):
    plain, masked = (make(mask_truncated_completions=mask, max_steps=1) for mask in (False, True))
    plain.train()
    masked.train()
    for name in ("mean_length", "max_length", "mean_terminated_length", "clipped_ratio"):
        assert steps(plain)[0][f"completions/{name}"] == steps(masked)[0][f"completions/{name}"]


def test_tokens_are_counted_once(make):
    trainer = make(num_iterations=3, max_steps=3)
    trainer.train()
    total = sum(len(one.token_ids) for one in trainer.buffer.experiences)
    assert [log["num_tokens"] for log in steps(trainer)] == [total] * 3


# Dynamic sampling


class Constant:
    """Every prompt's completions are alike where the prompt says so."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.asked = []

    def sync(self, model):
        pass

    def generate(self, prompts, sampling, *, rows=None, max_tokens=None):
        self.asked += prompts
        lengths = [1 if "0" in self.tokenizer.decode(p) else 1 + n % 2 for p, n in zip(prompts, rows, strict=True)]
        return [Completion([7] * n, [-1.0] * n, "stop") for n in lengths]


def test_groups_without_a_signal_are_replaced(make, bpe_tokenizer):
    names = ["0 a", "b", "0 c", "d", "e", "f", "g", "h"]
    data = Dataset.from_list([{"prompt": name} for name in names])
    generator = Constant(bpe_tokenizer)
    common = {"rows": data, "rewards": by_length, "per_device_train_batch_size": 8, "shuffle_dataset": False}
    trainer = make(generator=generator, dynamic_sampling_rounds=3, max_steps=1, **common)
    trainer.train()
    asked = [bpe_tokenizer.decode(prompt) for prompt in generator.asked[::2]]
    assert asked == names[:6]  # 4, and exactly 2 more
    log = steps(trainer)[0]
    assert (log["dynamic_sampling/rounds"], log["dynamic_sampling/extra_prompts"]) == (1, 2)
    assert log["dynamic_sampling/frac_with_signal"] == pytest.approx(4 / 6)
    assert log["frac_reward_zero_std"] == 0
    assert all(one.advantage for one in trainer.buffer.experiences)


def test_dynamic_sampling_gives_up(make, bpe_tokenizer):
    data = Dataset.from_list([{"prompt": f"0 {i}"} for i in range(3)])
    generator = Constant(bpe_tokenizer)
    trainer = make(generator=generator, rows=data, rewards=by_length, dynamic_sampling_rounds=2, max_steps=1)
    trainer.train()
    assert len(generator.asked) == (2 + 2 + 2) * 2
    assert steps(trainer)[0]["frac_reward_zero_std"] == 1


def test_the_signal_can_be_that_of_one_reward(make, bpe_tokenizer):
    """A reward for style differs in every group, so that of the sum nothing would be missing."""

    def style(completions, **_):
        return [0.001 * i for i in range(len(completions))]

    names = ["0 a", "b", "0 c", "d", "e", "f", "g", "h"]
    common = {"rows": Dataset.from_list([{"prompt": name} for name in names]), "rewards": [by_length, style]}
    common |= {"per_device_train_batch_size": 8, "shuffle_dataset": False, "max_steps": 1}
    for name, expected in ((None, 4), ("style", 4), ("by_length", 6)):
        generator = Constant(bpe_tokenizer)
        trainer = make(generator=generator, dynamic_sampling_rounds=3, dynamic_sampling_reward=name, **common)
        trainer.train()
        assert [bpe_tokenizer.decode(prompt) for prompt in generator.asked[::2]] == names[:expected]
    with pytest.raises(ValueError, match="dynamic_sampling_reward='by_lenth' is unknown; choose one of by_length, sty"):
        make(dynamic_sampling_rounds=3, dynamic_sampling_reward="by_lenth", **common)


def test_groups_of_the_past_stand_in_for_those_without_a_signal(make):
    def only_at_first(completions, trainer_state, **_):
        return [float(i) if trainer_state.global_step == 0 else 0.0 for i in range(len(completions))]

    trainer = make(generator=None, rewards=only_at_first, replay_buffer_size=8, max_steps=3, learning_rate=0.01)
    trainer.train()
    first, second, third = steps(trainer)
    assert [log["replay/groups"] for log in (first, second, third)] == [0, 2, 1], (
        "of five prompts the last block has one"
    )
    assert (second["reward_std"], third["frac_reward_zero_std"]) == (0, 1)
    assert min(second["grad_norm"], third["grad_norm"]) > 0
    kept = [group for _, group in trainer.replay.groups]
    assert trainer.buffer.experiences in kept
    batch = trainer.batch_of(trainer.buffer.experiences)
    moved = (trainer.policy_logps(batch) - batch["old_logps"])[batch["completion_mask"].bool()]
    assert moved.abs().max() > 1e-3, "the ratio is to the policy that wrote them"


def test_a_run_that_cannot_learn_is_told(make, caplog, bpe_tokenizer):
    class Endless(Constant):
        def generate(self, prompts, sampling, *, rows=None, max_tokens=None):
            return [Completion([7] * sampling.max_tokens, [-1.0] * sampling.max_tokens, "length") for _ in prompts]

    config = {"rewards": lambda completions, **_: [0.0] * len(completions), "max_steps": 5}
    with caplog.at_level(logging.WARNING):
        trainer = make(generator=Endless(bpe_tokenizer), **config)
        trainer.train()
    told = [record.getMessage() for record in caplog.records if "clipped_ratio" in record.getMessage()]
    assert trainer.state.global_step == 5
    assert len(told) == 1
    assert told[0].startswith("step 3: in 3 logs in a row completions/clipped_ratio was 1 and reward_std 0")
    assert "Raise max_completion_length (6)" in told[0]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        trainer = make(generator=Endless(bpe_tokenizer), stop_on_dead_run=True, **config)
        trainer.train()
    assert caplog.text.count("The run ends here, with a checkpoint, as stop_on_dead_run=True") == 1
    assert trainer.state.global_step == 3
    assert Path(trainer.args.output_dir, "checkpoint-3", "rollouts.json").is_file()


def test_a_run_whose_completions_are_all_cut_off_and_masked_is_told(make, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = make(generator=None, mask_truncated_completions=True, max_completion_length=1, max_steps=4)
        trainer.train()
    assert set(losses(trainer)) == {0.0}
    assert caplog.text.count("mask_truncated_completions is on") == 1


def test_what_a_log_cannot_have_is_said_at_the_start(make, caplog):
    with caplog.at_level(logging.INFO):
        make()
        assert "beta=0: there is no reference" in caplog.text
        assert "ratios are 1, nothing is clipped" in caplog.text
        caplog.clear()
        make(beta=0.1, num_iterations=2)
    assert "beta=0" not in caplog.text
    assert "ratios are 1" not in caplog.text


def test_rows_that_cannot_be_asked_or_scored_are_refused_by_the_constructor(make):
    def needs(completions, solution):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="reward function needs needs 'solution', which the rows lack"):
        make(rewards=needs)
    with pytest.raises(ValueError, match="the prompt is None"):
        make(rows=Dataset.from_list([{"question": "What?"}]))
    with pytest.raises(ValueError, match="the prompt is None"):
        make(more={"eval_dataset": {"one": Dataset.from_list([{"question": "What?"}])}})


# Evaluation


def test_evaluation_disturbs_nothing(make, prompts):
    common = {"generator": None, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 4, "learning_rate": 1.0}
    plain = make(**common)
    plain.train()
    watched = make(
        more={"eval_dataset": prompts}, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, **common
    )
    watched.train()
    assert losses(plain) == losses(watched)
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_user_pain_7_8_the_best_model_is_the_one_that_earns_most(make, prompts, caplog):
    settings = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    settings |= {"save_steps": 1, "max_steps": 3, "learning_rate": 0.5}
    trainer = make(generator=None, more={"eval_dataset": prompts}, **settings)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "metric_for_best_model" not in caplog.text
    rewards = [log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log]
    assert trainer.state.best_metric == max(rewards) > min(rewards)
    with caplog.at_level(logging.WARNING):
        make(more={"eval_dataset": prompts}, metric_for_best_model="loss", **settings)
    assert "metric_for_best_model='loss' is near 0 on rollouts" in caplog.text


def test_evaluation_is_the_same_each_time_and_has_its_own_group_size(make, prompts):
    trainer = make(generator=None, more={"eval_dataset": prompts}, num_generations_eval=3, per_device_eval_batch_size=4)
    first, second = trainer.evaluate(), trainer.evaluate()
    names = [name for name in first if "runtime" not in name and "second" not in name]
    assert {name: first[name] for name in names} == {name: second[name] for name in names}
    assert {"eval_loss", "eval_reward", "eval_rewards/vowels/mean", "eval_completions/mean_length"} <= first.keys()
    assert make(generator=None, more={"eval_dataset": prompts}, num_generations_eval=1).evaluate()["eval_loss"] == 0


def test_a_generator_that_gives_too_few_completions_is_named(make):
    class Lazy(Constant):
        def generate(self, prompts, sampling, *, rows=None, max_tokens=None):
            return []

    with pytest.raises(ValueError, match="Lazy gave 0 completions for 4 prompts"):
        make(generator=Lazy(None)).train()


def test_predict_measures_what_evaluate_does(make, prompts):
    trainer = make(generator=None)
    measured, evaluated = trainer.predict(prompts).metrics, trainer.evaluate(prompts)
    assert measured["test_reward"] == evaluated["eval_reward"]


def test_plain_training_arguments_will_do(tiny_llama, bpe_tokenizer, prompts, tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no")
    trainer = GRPOTrainer(tiny_llama, by_length, args, prompts, processing_class=bpe_tokenizer)
    assert (trainer.args.max_steps, trainer.args.remove_unused_columns) == (1, False)


def test_evaluation_loss_is_the_mean_over_all_completions(make, prompts):
    sizes = (1, 4, 16)
    found = [
        make(more={"eval_dataset": prompts}, per_device_eval_batch_size=size, beta=0.1).evaluate() for size in sizes
    ]
    for other in found[1:]:
        assert other["eval_reward"] == pytest.approx(found[0]["eval_reward"])
        assert other["eval_kl"] == pytest.approx(0.0, abs=1e-6)


# Models


def test_completions_beyond_learned_positions_are_refused_at_once(make, tmp_path):
    config = transformers.GPT2Config(vocab_size=400, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(ValueError, match="max_completion_length=16 and a prompt need more positions than the 16"):
        make(model=model, max_completion_length=16)
    assert make(model=model, max_completion_length=15).args.max_completion_length == 15
