"""An environment a conversation: reset with the row, called by the model, asked for a reward in the end."""

import asyncio
import copy

import pytest

from strop.rollout.encode import Encoder
from strop.rollout.environments import Environments
from strop.rollout.episodes_tools import ToolEpisodes
from strop.rollout.types import Sampling

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>tool\n{{ m.content }}<|im_end|>\n{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Counter:
    """Counts up to a goal."""

    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, goal, **row):
        self.goal, self.count, self.row = goal, 0, row
        return f" Count to {goal}."

    def add(self, n: int) -> str:
        """Counts on.

        Args:
            n: By how much.
        """
        self.count += n
        return f"at {self.count}"

    def get_reward(self):
        return 1.0 if self.count == self.goal else 0.0

    @property
    def state(self):
        raise AssertionError("a property is no tool")

    def _secret(self):
        raise AssertionError("not public")


class Room:
    """Has a door, and no opinion."""

    async def reset(self, **row):
        await asyncio.sleep(0)
        self.is_open = False

    async def open(self) -> bool:
        """Opens the door."""
        self.is_open = True
        return self.is_open


class AsyncJudge(Room):
    async def get_reward(self):
        await asyncio.sleep(0.1)
        return None if not self.is_open else 0.5


def call(name, **arguments):
    written = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{written}}}}}</tool_call><|im_end|>'


@pytest.fixture
def tokenizer(bpe_tokenizer):
    tokenizer = copy.deepcopy(bpe_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def episodes(scripted, tokenizer):
    def made(factory, replies, tools=()):
        generator = scripted(tokenizer, dict(enumerate(replies)))
        return ToolEpisodes(generator, Encoder(tokenizer), tools, Environments(factory))

    return made


def rows(*goals, **more):
    return [{"prompt": [{"role": "user", "content": "Go."}], "goal": goal, **more} for goal in goals]


def test_each_row_has_an_environment_which_is_given_its_columns(episodes):
    replies = [[call("add", n=2), call("add", n=1), "ok<|im_end|>"], [call("add", n=4), "ok<|im_end|>"]]
    played = episodes(Counter, replies)
    given = rows(3, 5, level="easy")
    rollouts = played.roll_out(given, [0, 1], Sampling(max_tokens=2000))
    environments = [rollout.columns["environments"] for rollout in rollouts]
    assert [(e.count, e.goal) for e in environments] == [(3, 3), (4, 5)]
    assert environments[0].row == {"prompt": given[0]["prompt"], "level": "easy"}
    assert played.own_rewards == ("Counter",)
    assert [rollout.rewards for rollout in rollouts] == [{"Counter": 1.0}, {"Counter": 0.0}]
    assert [m["content"] for m in rollouts[0].completion if m["role"] == "tool"] == ["at 2", "at 3"]


def test_what_reset_returns_is_read_after_the_prompt(episodes, tokenizer):
    (rollout,) = episodes(Counter, [["ok<|im_end|>"]]).roll_out(rows(3), [0], Sampling(max_tokens=2000))
    assert rollout.prompt == [{"role": "user", "content": "Go. Count to 3."}]
    assert rollout.row["prompt"] == [{"role": "user", "content": "Go."}]
    assert tokenizer.decode(rollout.token_ids).startswith("<|im_start|>user\nGo. Count to 3.<|im_end|>")


def test_environments_are_used_again(episodes):
    played, made = episodes(Counter, [["ok<|im_end|>"]] * 2), Counter.made
    for _ in range(3):
        rollouts = played.roll_out(rows(0, 1), [0, 1], Sampling(max_tokens=2000))
        assert [rollout.rewards["Counter"] for rollout in rollouts] == [1.0, 0.0]
    assert Counter.made == made + 1


def test_rows_name_their_environment_where_there_are_several(episodes):
    played = episodes(
        {"count": Counter, "door": AsyncJudge, "yard": AsyncJudge},
        [[call("add", n=3), "ok<|im_end|>"], [call("open"), "ok<|im_end|>"], [call("add", n=3), "ok<|im_end|>"]],
    )
    given = [rows(3, environment=name)[0] for name in ("count", "door", "yard")]
    rollouts = played.roll_out(given, [0, 1, 2], Sampling(max_tokens=2000))
    assert played.own_rewards == ("Counter", "AsyncJudge")
    assert [rollout.rewards for rollout in rollouts] == [
        {"Counter": 1.0, "AsyncJudge": None},
        {"Counter": None, "AsyncJudge": 0.5},
        {"Counter": None, "AsyncJudge": None},
    ]
    assert "there is no tool 'add'; there are open" in rollouts[2].completion[1]["content"]
    assert "environment" not in rollouts[0].columns["environments"].row
    given[1]["environment"] = "dor"
    with pytest.raises(ValueError, match=r"row 1 of the batch is for the environment 'dor'.*Did you mean 'door'"):
        played.roll_out(given, [0, 1, 2], Sampling(max_tokens=2000))


def test_an_environment_without_a_reward_gives_none(episodes):
    played = episodes(Room, [[call("open"), "ok<|im_end|>"]])
    (rollout,) = played.roll_out(rows(1), [0], Sampling(max_tokens=2000))
    assert (played.own_rewards, rollout.rewards) == ((), {})
    assert rollout.completion[1]["content"] == "True"


class Silent:
    def add(self, n: int) -> int:
        """Adds.

        Args:
            n: What.
        """
        return n


class Boastful(Room):
    def get_reward(self):
        return float("nan")


class Undescribed(Counter):
    def undescribed(self, n):
        return n


def needs_an_argument(host):
    return Room()


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (Silent, "environment Silent has no method reset"),
        (Undescribed, "tool undescribed doesn't say"),
        (needs_an_argument, "can't be called without arguments"),
        (3, "must be callable without arguments, not 3"),
        ({}, "empty mapping"),
    ],
)
def test_classes_that_are_no_environments_are_refused(factory, reason):
    with pytest.raises(ValueError, match=reason):
        Environments(factory)


def test_rewards_are_finite_numbers(episodes):
    with pytest.raises(ValueError, match=r"Boastful\.get_reward returned 'nan'"):
        episodes(Boastful, [["ok<|im_end|>"]]).roll_out(rows(1), [0], Sampling(max_tokens=2000))


def test_a_tool_may_not_have_the_name_of_a_method(episodes):
    def add(n: int) -> int:
        """Adds.

        Args:
            n: What.
        """
        return n

    with pytest.raises(ValueError, match="two tools named add"):
        episodes(Counter, [], tools=[add])
