"""Preparation of streams: row by row as they are read, what is wrong with their first rows known at once."""

from dataclasses import dataclass

import pytest
from datasets import IterableDataset

from strop.data.arguments import DataArguments, PackingArguments, TargetArguments
from strop.data.prepare import HOPELESS_ROWS, prepare

LONG = [{"input_ids": [7] * 20 + [8] * 4, "completion_mask": [0] * 20 + [1] * 4}]


@dataclass
class Args(DataArguments, PackingArguments, TargetArguments):
    seed: int = 0


@pytest.fixture
def tokenizer(word_tokenizer):
    return word_tokenizer


def rows_of(dataset):
    return [dict(row) for row in dataset]


def rows_to_stream(count):
    for index in range(count):
        yield {"prompt": "The sky is", "completion": " blue." * (1 + index % 5)}


def stream_of(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


def test_a_stream_is_prepared_as_a_set_is(tokenizer):
    args = Args(max_length=6)
    whole, counted = prepare(list(rows_to_stream(1100)), tokenizer, args)
    stream, report = prepare(
        IterableDataset.from_generator(rows_to_stream, gen_kwargs={"count": 1100}), tokenizer, args
    )
    assert isinstance(stream, IterableDataset)
    assert report.rows_in == 0
    assert rows_of(stream) == rows_of(whole)
    assert report.to_dict() == counted.to_dict()


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_without_end_is_read_as_it_is_needed(tokenizer, packing):
    endless = IterableDataset.from_generator(rows_to_stream, gen_kwargs={"count": 10**12})
    stream, report = prepare(endless, tokenizer, Args(max_length=6), packing=packing)
    assert len(rows_of(stream.take(2))) == 2
    assert 0 < report.rows_in < 5000


def test_a_prepared_stream_passes_through(tokenizer):
    args = Args(max_length=8)
    stream = IterableDataset.from_generator(lambda: iter([{"text": "The sky is blue."}] * 9))
    once, _ = prepare(stream, tokenizer, args, packing=True)
    twice, _ = prepare(once, tokenizer, args, packing=True)
    assert rows_of(twice) == rows_of(once)
    assert rows_of(once)[0]["seq_lengths"] == [6]


def test_a_hopeless_stream_is_given_up(tokenizer):
    stream, _ = prepare(
        IterableDataset.from_generator(lambda: iter(LONG * (HOPELESS_ROWS + 5))), tokenizer, Args(max_length=16)
    )
    with pytest.raises(ValueError, match="the longest prompt has 20 tokens"):
        next(iter(stream))


def test_a_stream_is_tried_before_it_is_needed(tokenizer):
    """Its first 100 rows are prepared at once; a shorter stream is known to its end."""
    bad = [{"prompt": "a", "completion": "b"}] * 5 + [{"prompt": "a", "completion": ""}]
    with pytest.raises(ValueError, match="train row 5: the completion '' is empty"):
        prepare(stream_of(bad), tokenizer, Args())
    with pytest.raises(ValueError, match="no row of the train data set is left: 5 of 5 are longer than max_length=2"):
        prepare(stream_of([{"text": "The sky is blue."}] * 5), tokenizer, Args(max_length=2, overlong="drop"))


def test_a_stream_warns_once_about_a_thing(tokenizer, caplog):
    rows, _ = prepare(stream_of([{"text": "The sky is blue."}] * 3000), tokenizer, Args(max_length=3))
    assert sum(1 for _ in rows) == 3000
    assert [message for message in caplog.messages if "truncated" in message] == [
        "train: 1000 of 1000 rows were truncated, 3000 tokens lost"
    ]
