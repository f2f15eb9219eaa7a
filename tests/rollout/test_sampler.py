"""Every prompt once an epoch, in an order of the epoch's own, resumable at any row."""

import pytest
from datasets import Dataset, IterableDataset

from strop.rollout.sampler import PromptSource


def numbers(rows):
    return [row["n"] for row in rows]


def rows(count):
    return Dataset.from_list([{"n": i} for i in range(count)])


def stream(count):
    return IterableDataset.from_generator(lambda: ({"n": i} for i in range(count)))


def test_the_order_is_that_of_trl():
    source = PromptSource(rows(7), seed=0)
    assert [numbers(source.take(3)) for _ in range(2)] == [[4, 0, 5], [3, 2, 6]]
    assert len(source.take(3)) == 1  # which TRL leaves out
    assert [numbers(source.take(3)) for _ in range(2)] == [[6, 2, 4], [0, 3, 5]]


def test_each_epoch_has_all_rows_in_its_own_order():
    source = PromptSource(rows(10), seed=3)
    epochs = [numbers(source.take(10)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert numbers(PromptSource(rows(10), seed=3).take(10)) == epochs[0]


def test_without_shuffling_rows_come_as_they_are():
    source = PromptSource(rows(5), shuffle=False)
    assert [numbers(source.take(2)) for _ in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]


def test_across_the_end_of_an_epoch():
    source = PromptSource(rows(3), shuffle=False)
    assert numbers(source.take(7, across=True)) == [0, 1, 2, 0, 1, 2, 0]
    assert (source.epoch, source.position) == (2, 1)


@pytest.mark.parametrize("made", [rows, stream])
@pytest.mark.parametrize("shuffle", [True, False])
def test_it_goes_on_where_it_was(made, shuffle):
    source = PromptSource(made(7), shuffle, seed=1)
    for _ in range(4):
        source.take(2)
    other = PromptSource(made(7), shuffle, seed=1)
    other.go_to(source.epoch, source.position)
    assert [numbers(source.take(2)) for _ in range(6)] == [numbers(other.take(2)) for _ in range(6)]


def test_a_stream_is_read_like_a_data_set():
    source = PromptSource(stream(6), shuffle=False)
    assert [numbers(source.take(2)) for _ in range(5)] == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]


@pytest.mark.parametrize("made", [lambda: stream(0)])
def test_no_rows_are_refused(made):
    with pytest.raises(ValueError, match="no rows"):
        PromptSource(made()).take(1)
