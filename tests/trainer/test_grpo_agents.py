"""Tools, environments and functions that play whole episodes, through the trainer."""

import copy
import json
import logging
import math
import time
from pathlib import Path

import pytest
from datasets import Dataset

from strop.rollout.buffer import Experience
from strop.rollout.types import Completion
from strop.trainer.grpo import GRPOConfig, GRPOTrainer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": %d}}\n</tool_call><|im_end|>'


class Caller:
    """Calls a tool, with another number in every other completion, and then repeats the answer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.calls = 0

    def sync(self, model):
        pass

    def generate(self, prompts, sampling, *, rows=None, max_tokens=None):
        return [self.reply(self.tokenizer.decode(prompt)) for prompt in prompts]

    def reply(self, text: str) -> Completion:
        if "<tool_response>\n" in text:
            reply = text.rpartition("<tool_response>\n")[2].split("\n")[0] + "<|im_end|>"
        else:
            self.calls += 1
            reply = CALL % (4 + self.calls % 2)
        ids = self.tokenizer(reply, add_special_tokens=False).input_ids
        return Completion(ids, [-1.0] * len(ids), "stop")


class Calculator:
    """An environment."""

    def reset(self, **row):
        self.answer = None
        return "What is 3 times 4?"

    def multiply(self, a: int, b: int) -> int:
        """Multiplies.

        Args:
            a: A number.
            b: Another one.
        """
        self.answer = a * b
        return self.answer

    def get_reward(self):
        return float(self.answer == 12)


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: A number.
        b: Another one.
    """
    return a * b


def is_12(completions, **_):
    return [float(messages[-1]["content"] == "12") for messages in completions]


@pytest.fixture
def train(tiny_llama, bpe_tokenizer, tmp_path):
    def run(reward=None, rows=None, generator=Caller, options=(), **given):
        tokenizer = copy.deepcopy(bpe_tokenizer)
        tokenizer.chat_template = TEMPLATE
        config = GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=400,
            logging_steps=1,
            **{"max_steps": 1, "vllm_importance_sampling_correction": False} | dict(options),
        )
        trainer = GRPOTrainer(
            tiny_llama, reward, config, rows, processing_class=tokenizer, generator=generator(tokenizer), **given
        )
        trainer.train()
        return trainer, trainer.state.log_history[0]

    return run


def test_a_model_with_tools_trains_on_what_it_wrote(train):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "3 times 4?"}]}] * 2)
    trainer, log = train(is_12, rows, tools=[multiply])
    assert (log["tools/call_frequency"], log["tools/failure_frequency"]) == (1, 0)
    assert log["reward"] == 0.5
    for one in trainer.buffer.experiences:
        trained = [t for t, m in zip(one.token_ids, one.completion_mask, strict=True) if m]
        text = trainer.processing_class.decode(trained)
        assert "tool_response" not in text
        assert text.startswith("<tool_call>")
        assert one.advantage == pytest.approx(0.7070, abs=1e-3) or one.advantage == pytest.approx(-0.7070, abs=1e-3)


def test_a_tool_that_hangs_is_a_failed_call(train):
    def multiply(a: int, b: int) -> int:
        """Never comes back.

        Args:
            a: A number.
            b: Another one.
        """
        while True:
            time.sleep(0.01)

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "3 times 4?"}]}] * 2)
    _, log = train(is_12, rows, tools=[multiply], options={"tool_timeout": 0.05})
    assert (log["tools/failure_frequency"], log["reward"]) == (1, 0)
    with pytest.raises(ValueError, match="tool_timeout=1 would have no effect with no tools"):
        train(is_12, rows, options={"tool_timeout": 1})


def test_an_environment_rewards_itself_and_needs_no_rows(train, tmp_path):
    _, log = train(environment_factory=Calculator)
    assert log["rewards/Calculator/mean"] == log["reward"] == 0.5
    (file,) = Path(tmp_path, "rollouts").iterdir()
    line = json.loads(file.read_text().splitlines()[0])
    assert "What is 3 times 4?" in line["prompt"][-1]["content"]
    assert line["completion"][1]["role"] == "tool"


def test_a_function_plays_episodes(train, bpe_tokenizer):
    def play(prompts, trainer):
        lengths = [2 + i % 2 for i in range(len(prompts))]
        return {
            "prompt_ids": [[10, 11]] * len(prompts),
            "completion_ids": [[7] * n for n in lengths],
            "logprobs": [[-1.0] * n for n in lengths],
            "score": [float(n) for n in lengths],
        }

    rows = Dataset.from_list([{"prompt": "3 times 4?"}] * 2)
    _, log = train(lambda completions, score, **_: score, rows, rollout_func=play)
    assert log["reward"] == 2.5
    assert log["completions/mean_length"] == 2.5


def second_id(completion_ids, **_):
    return [float(ids[1]) for ids in completion_ids]


@pytest.mark.parametrize("steps_per_generation", [1, 4])
@pytest.mark.parametrize("unknown", ["all", "of a row", "of a token", "of a later block"])
def test_what_a_function_does_not_say_is_not_corrected(train, caplog, unknown, steps_per_generation):
    """Without log-probabilities of a sampler ratios to it are 1, and nothing is NaN."""

    def play(prompts, trainer):
        size = len(prompts)
        ids = [[7, 8 + i, 9] for i in range(size)]
        logps = [[-5.0, -6.0, -5.5] for _ in prompts]
        if unknown == "all":
            logps = None
        elif unknown == "of a row":
            logps[1] = None
        elif unknown == "of a token":
            logps[1][2] = None
        elif trainer.state.global_step:
            logps = [None] * size
        else:  # those of a first block are exactly those of the policy, which are then taken as they are
            experiences = [Experience([10, 11, *own], 2, [0, 0, 1, 1, 1]) for own in ids]
            logps = trainer.policy_logps(trainer.ready_batch_of(experiences)).tolist()
        return {"prompt_ids": [[10, 11]] * size, "completion_ids": ids, "logprobs": logps}

    rows = Dataset.from_list([{"prompt": "3 times 4?"}] * 16)
    options = {"vllm_importance_sampling_correction": True, "off_policy_mask_threshold": 0.5, "max_steps": 6}
    options |= {"steps_per_generation": steps_per_generation, "learning_rate": 0.01}
    with caplog.at_level(logging.WARNING):
        trainer, _ = train(second_id, rows, options=options, rollout_func=play)
    assert trainer.is_exact is (unknown == "of a later block")
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert all(math.isfinite(log[name]) for log in logs for name in ("loss", "grad_norm"))
    assert any(log["grad_norm"] > 0 for log in logs)
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert caplog.text.count("rollout_func returned no logprobs") == 1
    if unknown == "all":
        assert not any(name.startswith("sampling/") for log in logs for name in log)
        is_asked = trainer.buffer.experiences[0].old_logps is not None
        assert is_asked is (steps_per_generation > 1), "no forward pass for ratios of 1"


def test_a_function_and_tools_contradict_each_other(train):
    rows = Dataset.from_list([{"prompt": "3 times 4?"}])
    with pytest.raises(ValueError, match="tools and rollout_func are given"):
        train(is_12, rows, tools=[multiply], rollout_func=print)
