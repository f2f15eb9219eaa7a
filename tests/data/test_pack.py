"""Packing: TRL's numbers, cases by hand, and laws over random documents against a direct reading of the rules."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, IterableDataset, LargeList, List, Value

from strop.data import pack
from strop.data.pack import best_fit_decreasing, pack_dataset

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "packing.json").read_text())
"""What TRL 1.16 makes of documents whose n-th one has tokens 100n, 100n + 1, ..."""

STRATEGIES = ["bfd", "bfd_split", "wrapped"]


def documents(lengths):
    """Every token differs, and its label is -token - 1, so both must have travelled together."""
    ids = [[100 * n + t for t in range(length)] for n, length in enumerate(lengths)]
    columns = {"input_ids": ids, "labels": [[-t - 1 for t in row] for row in ids]}
    return Dataset.from_dict(columns, features=Features({name: List(Value("int64")) for name in columns}))


def random_documents(seed, num_documents=60, longest=20):
    rng = np.random.default_rng(seed)
    return documents(rng.integers(0, longest + 1, num_documents).tolist())


def bfd_by_the_rules(lengths, capacity):
    """Bins of documents, found by looking at every open bin for every document."""
    bins = []  # a bin: [space, when it came to that space, its documents]
    order = sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n])
    for clock, n in enumerate(order):
        fits = [b for b in bins if b[0] >= lengths[n]]
        if not fits:
            bins.append([capacity, 0, []])
        chosen = min(fits, key=lambda b: b[:2]) if fits else bins[-1]
        chosen[0], chosen[1] = chosen[0] - lengths[n], clock
        chosen[2].append(n)
    return [b[2] for b in bins]


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: f"{g['strategy']}-{g['seq_length']}-{len(g['lengths'])}")
def test_equals_trl(golden):
    dataset = documents(golden["lengths"])
    if golden.get("iterable"):
        dataset = dataset.to_iterable_dataset()
    packed = list(pack_dataset(dataset, golden["seq_length"], golden["strategy"], golden.get("map_kwargs")))
    assert [row["input_ids"] for row in packed] == golden["input_ids"]
    assert [row["labels"] for row in packed] == [[-t - 1 for t in row] for row in golden["input_ids"]]
    assert [row["seq_lengths"] for row in packed if "seq_lengths" in row] == golden.get("seq_lengths", [])


def test_long_documents_by_hand():
    rows = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11], [12]]
    dataset = Dataset.from_dict({"input_ids": rows})
    # longest first: 6 -> 4 tokens fill a row; 3; 2 doesn't fit beside 3; 1 fits best beside 3
    assert pack_dataset(dataset, 4, "bfd")["input_ids"][:] == [[1, 2, 3, 4], [9, 10, 11, 12], [7, 8]]
    # 4 | 3 | then 5-6 (cut off the first) and 7-8, both of length 2 and in this order | 1 fits best beside 3
    split = pack_dataset(dataset, 4, "bfd_split")
    assert split["input_ids"][:] == [[1, 2, 3, 4], [9, 10, 11, 12], [5, 6, 7, 8]]
    assert split["seq_lengths"][:] == [[4], [3, 1], [2, 2]]


def test_masks_travel_with_their_tokens():
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3, 4, 5], [6, 7, 8]], "mask": [[0, 0, 1, 1, 1], [0, 1, 1]]})
    (row,) = pack_dataset(dataset, 8)
    assert row == {"input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "mask": [0, 0, 1, 1, 1, 0, 1, 1], "seq_lengths": [5, 3]}


def test_the_whole_set_is_packed_together():
    # 1000 documents of 3 tokens and then 1000 of 1: only together do they fill rows of 4
    dataset = documents([3] * 1000 + [1] * 1000)
    assert len(pack_dataset(dataset, 4)) == 1000
    assert len(pack_dataset(dataset, 4, map_kwargs={"batch_size": 1000})) == 1000 + 250


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_decreasing_follows_the_rules(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 40))
    lengths = rng.integers(1, capacity + 1, int(rng.integers(0, 300)))
    ordered = np.sort(lengths)[::-1]
    bins = best_fit_decreasing(ordered, capacity)
    expected = bfd_by_the_rules(ordered.tolist(), capacity)
    assert [np.flatnonzero(bins == b).tolist() for b in range(len(expected))] == expected
    assert len(bins) == len(lengths)


@pytest.mark.parametrize("seed", range(10))
def test_rows_are_the_bins_of_the_rules(seed):
    dataset = random_documents(seed, longest=16)
    ids = dataset["input_ids"][:]
    bins = bfd_by_the_rules([len(row) for row in ids], 16)
    assert pack_dataset(dataset, 16)["input_ids"][:] == [[t for n in members for t in ids[n]] for members in bins]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(4))
def test_laws(seed, strategy, streaming, monkeypatch):
    monkeypatch.setattr(pack, "BLOCK_TOKENS", 25)  # so that a plan has many blocks
    monkeypatch.setattr(pack, "STREAM_WINDOW", 13)
    dataset = random_documents(seed)
    kept = [row[:7] if strategy == "bfd" else row for row in dataset["input_ids"][:]]
    packed = pack_dataset(dataset.to_iterable_dataset() if streaming else dataset, 7, strategy)
    first, second = list(packed), list(packed)
    tokens = [t for row in first for t in row["input_ids"]]
    assert first == second
    assert sorted(tokens) == sorted(t for row in kept for t in row)  # none lost, none twice
    assert [t for row in first for t in row["labels"]] == [-t - 1 for t in tokens]
    assert all(0 < len(row["input_ids"]) <= 7 for row in first)
    if strategy == "wrapped":
        assert tokens == [t for row in kept for t in row]
        assert streaming or all(len(row["input_ids"]) == 7 for row in first[:-1])
    else:
        for row in first:
            assert sum(row["seq_lengths"]) == len(row["input_ids"])
            for end, length in zip(np.cumsum(row["seq_lengths"]), row["seq_lengths"], strict=True):
                piece = row["input_ids"][end - length : end]
                assert piece == list(range(piece[0], piece[0] + length))  # consecutive tokens of one document


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layout_of_the_source_changes_nothing(strategy):
    """Selections, slices, shards and chunks of a table give what a fresh copy of the same rows gives."""
    dataset = random_documents(0)
    chunked = Dataset(pa.concat_tables([dataset.data.table.slice(i, 7) for i in range(0, 60, 7)]))
    order = np.random.default_rng(0).permutation(60)[:41]
    for view in (
        chunked,
        chunked.select(range(11, 50)),
        chunked.select(order),
        chunked.shuffle(seed=1).select(range(9)),
    ):
        copy = Dataset.from_dict(view.to_dict(), features=view.features)
        assert pack_dataset(view, 9, strategy).to_dict() == pack_dataset(copy, 9, strategy).to_dict()


def test_rows_outside_a_selection_are_not_judged():
    dataset = Dataset.from_dict({"input_ids": [[1], [2, 3], [4, 5]], "labels": [[1, 1, 1], [2, 3], [4, 5]]})
    assert pack_dataset(dataset.select([2, 1]), 4)["labels"][:] == [[4, 5, 2, 3]]
    with pytest.raises(ValueError, match=r"Row 1 has 1 values in 'input_ids' but 3 in 'labels'"):
        pack_dataset(dataset.select([2, 0]), 4)


def test_types_and_features_are_kept():
    features = Features(
        {
            "input_ids": LargeList(Value("uint16")),
            "mask": List(Value("bool")),
            "advantages": List(Value("float32")),
            "old_logps": List(Value("float64")),
            "kind": List(ClassLabel(names=["prompt", "answer"])),
            "words": List(Value("string")),
        }
    )
    columns = {
        "input_ids": [[1, 2, 65535], [4]],
        "mask": [[True, False, True], [False]],
        "advantages": [[0.5, 1.5, 2.5], [3.5]],
        "old_logps": [[-1.0, None, -3.0], [-4.0]],
        "kind": [[0, 1, 1], [0]],
        "words": [["a", "b", "c"], ["d"]],
    }
    packed = pack_dataset(Dataset.from_dict(columns, features=features), 2, "bfd_split")
    assert packed.features == Features({**features, "seq_lengths": List(Value("int32"))})
    assert packed.data.table.schema.field("input_ids").type == pa.large_list(pa.uint16())
    assert packed["input_ids"][:] == [[1, 2], [65535, 4]]
    assert packed["mask"][:] == [[True, False], [True, False]]
    assert packed["old_logps"][:] == [[-1.0, None], [-3.0, -4.0]]
    assert packed["kind"][:] == [[0, 1], [1, 0]]
    assert packed["words"][:] == [["a", "b"], ["c", "d"]]


def test_nothing_in_gives_nothing_out():
    for lengths in ([], [0, 0]):
        packed = pack_dataset(documents(lengths), 4)
        assert packed.to_dict() == {"input_ids": [], "labels": [], "seq_lengths": []}
        assert packed.features["seq_lengths"] == List(Value("int32"))


def test_a_missing_document_is_an_empty_one():
    dataset = Dataset.from_dict({"input_ids": [[1, 2], None, [3]]})
    assert pack_dataset(dataset, 4)["input_ids"][:] == [[1, 2, 3]]


def test_the_format_is_restored():
    dataset = documents([3, 1]).with_format("torch", columns=["input_ids"])
    packed = pack_dataset(dataset, 4)
    assert packed.format["type"] == "torch"
    assert packed.format["columns"] == ["input_ids", "seq_lengths"]
    assert packed[0]["input_ids"].tolist() == [0, 1, 2, 100]
    assert pack_dataset(documents([3, 1]), 4).format["type"] is None
    stream = documents([3, 1]).to_iterable_dataset().with_format("numpy")
    assert next(iter(pack_dataset(stream, 4)))["labels"].tolist() == [-1, -2, -3, -101]


def test_every_split_of_a_dict_is_packed():
    packed = pack_dataset(DatasetDict(train=documents([3, 1]), test=documents([2])), 4)
    assert packed["train"]["seq_lengths"][:] == [[3, 1]]
    assert packed["test"]["seq_lengths"][:] == [[2]]


def test_equal_input_has_an_equal_fingerprint():
    dataset = documents([3, 1, 2])
    prints = [
        pack_dataset(d, n, s)._fingerprint
        for d, n, s in [(dataset, 4, "bfd"), (dataset, 4, "bfd"), (dataset, 5, "bfd"), (dataset, 4, "wrapped")]
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def counting_stream(pulled, length=3):
    def rows():
        for n in range(10_000):
            pulled.append(n)
            yield {"input_ids": [n] * length}

    return IterableDataset.from_generator(rows)


def test_a_stream_is_read_no_further_than_its_window(monkeypatch):
    pulled = []
    packed = iter(pack_dataset(counting_stream(pulled), 4, map_kwargs={"batch_size": 10}))
    assert pulled == []
    assert next(packed) == {"input_ids": [0, 0, 0], "seq_lengths": [3]}
    assert len(pulled) <= 11
    monkeypatch.setattr(pack, "STREAM_WINDOW", 5)
    pulled.clear()
    next(iter(pack_dataset(counting_stream(pulled), 4)))
    assert len(pulled) <= 6


def test_a_stream_goes_on_where_it_was():
    packed = pack_dataset(random_documents(0).to_iterable_dataset(), 8, map_kwargs={"batch_size": 10})
    rows = list(packed)
    reader = iter(packed)
    start = [next(reader) for _ in range(7)]
    state = packed.state_dict()
    packed.load_state_dict(state)
    assert start + list(packed) == rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_length": 0}, r"seq_length=0: a packed row must hold at least one token"),
        (
            {"strategy": "bfd_splt"},
            r"Unknown packing strategy 'bfd_splt'; known: bfd, bfd_split, wrapped. Did you mean 'bfd_split'\?",
        ),
        ({"map_kwargs": {"batchsize": 3}}, r"map_kwargs has 'batchsize'.*Did you mean 'batch_size'\?"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack_dataset(documents([1]), **{"seq_length": 4} | arguments)


def test_columns_that_cannot_be_cut():
    with pytest.raises(TypeError, match="Column 'id' has type int64, not a list"):
        pack_dataset(documents([2]).add_column("id", [7]), 4)
    with pytest.raises(ValueError, match="Row 1 has 2 values in 'input_ids' but 1 in 'labels'"):
        pack_dataset(Dataset.from_dict({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}), 4)
    with pytest.raises(ValueError, match="'seq_lengths': it is packed already"):
        pack_dataset(pack_dataset(documents([2]), 4), 4)


def test_arguments_of_map_about_speed_are_accepted():
    assert len(pack_dataset(documents([2, 2]), 4, map_kwargs={"num_proc": 2, "desc": "Packing"})) == 1
