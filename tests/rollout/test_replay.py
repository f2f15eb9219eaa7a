"""Groups without a signal make room for groups that had one."""

import json
from collections import Counter

from strop.rollout.buffer import Experience
from strop.rollout.replay import ReplayBuffer


def group(name: int, advantage: float, masked: bool = False) -> list[Experience]:
    mask = [0, 0] if masked else [0, 1]
    return [Experience([name, i], 1, mask, sign * advantage, [0.0, -1.0]) for i, sign in ((0, 1), (1, -1))]


def names(experiences):
    return [one.token_ids[0] for one in experiences]


def test_groups_that_teach_nothing_are_replaced_by_kept_ones_as_they_were():
    replay = ReplayBuffer(4)
    first, replaced = replay.refill(group(1, 0.7) + group(2, 0.0), [0.5, 0.0], 1)
    assert (names(first), replaced) == ([1, 1, 2, 2], 0)
    second, replaced = replay.refill(group(3, 0.0) + group(4, 0.7) + group(5, 0.7, masked=True), [0.0, 2.0, 1.0], 2)
    assert (names(second), replaced) == ([1, 1, 4, 4, 5, 5], 1)
    assert second[:2] == first[:2]
    assert [kept for kept, _ in replay.groups] == [2.0, 0.5]


def test_the_largest_spreads_stay():
    replay = ReplayBuffer(2)
    for number, spread in enumerate([0.1, 0.5, 0.3, 0.4]):
        replay.refill(group(number, 1.0), [spread], number)
    assert [spread for spread, _ in replay.groups] == [0.5, 0.4]


def test_groups_are_drawn_like_their_spreads_and_once_a_block():
    replay = ReplayBuffer(2)
    replay.refill(group(1, 1.0) + group(2, 1.0), [3.0, 1.0], 0)
    drawn = Counter(names(replay.refill(group(9, 0.0), [0.0], number)[0])[0] for number in range(2000))
    assert abs(drawn[1] / 2000 - 0.75) < 0.03
    assert sorted(names(replay.refill(group(8, 0.0) + group(9, 0.0), [0.0, 0.0], 1)[0])) == [1, 1, 2, 2]


def test_spreads_of_a_thousandth_are_drawn():
    replay = ReplayBuffer(2)
    replay.refill(group(1, 1.0) + group(2, 1.0), [3e-4, 1e-4], 0)
    drawn = Counter(names(replay.refill(group(9, 0.0), [0.0], number)[0])[0] for number in range(500))
    assert abs(drawn[1] / 500 - 0.75) < 0.06


def test_its_state_is_json():
    replay, again = ReplayBuffer(2), ReplayBuffer(2)
    replay.refill(group(1, 1.0), [3.0], 0)
    again.load(json.loads(json.dumps(replay.state())))
    assert again == replay
