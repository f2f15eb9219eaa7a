"""A block is trained as often as asked, its groups together, in an order that follows from the seed."""

import json

from strop.rollout.buffer import Experience, RolloutBuffer
from strop.rollout.plan import BatchPlan


def buffer(num_processes=1, batch_size=4, steps=2, iterations=2, group=4):
    return RolloutBuffer(BatchPlan(batch_size, num_processes, 1, steps, group, iterations), seed=5)


def experiences(count):
    return [Experience([0, i], 1, [0, 1], advantage=i / 3) for i in range(count)]


def names(batch):
    return [one.token_ids[1] for one in batch]


def drained(one, rank=0):
    batches = []
    while not one.is_used_up:
        batches.append(names(one.next_batch(rank)))
    return batches


def test_a_new_buffer_is_used_up():
    assert buffer().is_used_up


def test_each_pass_trains_all_once_and_groups_together():
    one = buffer(steps=4)
    one.fill(experiences(16), 4)
    batches = drained(one)
    assert len(batches) == 8
    for half in (batches[:4], batches[4:]):
        assert sorted(half) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert batches[:4] != batches[4:]


def test_blocks_have_orders_of_their_own_and_seeds_decide():
    one, same = buffer(steps=4), buffer(steps=4)
    orders = []
    for _ in range(2):
        one.fill(experiences(16), 4)
        same.fill(experiences(16), 4)
        orders.append(drained(one))
        assert drained(same) == orders[-1]
    assert orders[0] != orders[1]


def test_ranks_train_the_micro_batches_of_one():
    whole = buffer(batch_size=4)
    whole.fill(experiences(8), 4)
    parts = [buffer(num_processes=2, batch_size=2) for _ in range(2)]
    for part in parts:
        part.fill(experiences(8), 4)
    for batch in drained(whole):
        assert [name for rank, part in enumerate(parts) for name in names(part.next_batch(rank))] == batch


def test_a_small_block_leaves_some_ranks_without_a_share():
    parts = [buffer(num_processes=2, batch_size=4, iterations=1, group=2) for _ in range(2)]
    for part in parts:
        part.fill(experiences(2), 2)
    assert [drained(part, rank) for rank, part in enumerate(parts)] == [[[0, 1]], [[]]]


def test_it_goes_on_in_the_middle_of_a_block():
    one = buffer(steps=4)
    one.fill(experiences(16), 4)
    for _ in range(5):
        one.next_batch(0)
    other = buffer(steps=4)
    other.load(json.loads(json.dumps(one.state())))
    assert other.experiences == one.experiences
    assert drained(other) == drained(one)
    assert one.state()["experiences"] == []  # nothing of a used-up block is kept
