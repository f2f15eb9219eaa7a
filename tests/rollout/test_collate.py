"""The prompt of a group stands in a batch once; what isn't trained has no label."""

import pytest
import torch

from strop.models.logps import logps
from strop.rollout.buffer import Experience
from strop.rollout.collate import RolloutCollator

PROMPT = [5, 6, 7]


def experience(completion, mask=None, prompt=PROMPT, **more):
    mask = [1] * len(completion) if mask is None else mask
    numbers = {name: [0.0] * len(prompt) + values for name, values in more.items() if name != "advantage"}
    own = {"advantage": more.get("advantage", 0.0)}
    return Experience([*prompt, *completion], len(prompt), [0] * len(prompt) + mask, **own, **numbers)


def test_a_group_shares_its_prompt():
    batch = RolloutCollator(0)([experience([8, 9], advantage=1.0), experience([10], advantage=-1.0)])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert batch["num_tokens"] == 6
    assert batch["advantages"].tolist() == [[1.0], [-1.0]]
    assert batch["targets"].tolist() == [[8, 9], [10, 0]]


def test_streams_stand_at_their_tokens():
    batch = RolloutCollator(0)([experience([8, 9], old_logps=[-1.0, -2.0]), experience([10], old_logps=[-3.0])])
    assert batch["old_logps"].tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    assert "ref_logps" not in batch


def test_an_advantage_a_token_takes_the_place_of_one_a_row():
    streams = {"advantages": [0.5, -0.5], "returns": [1.0, 2.0], "old_values": [3.0, 4.0]}
    short = {name: numbers[:1] for name, numbers in streams.items()}
    batch = RolloutCollator(0)([experience([8, 9], **streams), experience([10], **short)])
    assert batch["advantages"].tolist() == [[0.5, -0.5], [0.5, 0.0]]
    assert batch["returns"].tolist() == [[1.0, 2.0], [1.0, 0.0]]
    assert batch["old_values"].tolist() == [[3.0, 4.0], [3.0, 0.0]]


def test_tokens_of_tools_are_context():
    batch = RolloutCollator(0)([experience([8, 9, 10], [1, 0, 1])])
    assert batch["completion_mask"].tolist() == [[1, 0, 1]]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize("experiences", [[], [experience([])]])
def test_nothing_written_is_a_batch_that_trains_nothing(experiences):
    batch = RolloutCollator(0)(experiences)
    assert batch["completion_mask"].sum() == 0
    assert batch["num_tokens"] == 0


def test_both_layouts_say_the_same(tiny_llama):
    tiny_llama.set_attn_implementation("strop")
    rows = [experience([8, 9]), experience([10, 11, 12], [1, 0, 1]), experience([3, 4], prompt=[20])]
    packed, padded = (RolloutCollator(0, layout)(rows) for layout in ("packed", "padded"))
    a = logps(tiny_llama, packed, temperature=0.7).logps
    tiny_llama.set_attn_implementation("sdpa")
    torch.testing.assert_close(a, logps(tiny_llama, padded, temperature=0.7).logps)
