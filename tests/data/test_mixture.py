"""Mixtures: how many rows of each source, which ones, in which order, and what is refused."""

import json
import logging
from collections import Counter

import pytest
from datasets import Dataset, IterableDatasetDict, disable_caching, enable_caching

from strop.data.mixture import DatasetConfig, DatasetMixtureConfig, get_dataset


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    yield disable_caching()
    enable_caching()


@pytest.fixture
def source(tmp_path):
    """source("a", 3) is the path of a file with the rows a0, a1 and a2."""

    def write(name, num_rows, column="text", **more):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({column: f"{name}{n}", **more}) + "\n" for n in range(num_rows)))
        return str(path)

    return write


def mixed(*sources, **settings):
    return get_dataset(DatasetMixtureConfig(datasets=list(sources), **settings))


def texts(rows):
    return [row["text"] for row in rows]


def names(rows):
    return Counter(text[0] for text in texts(rows))


def test_sources_follow_one_another(source):
    splits = mixed({"path": source("a", 2)}, DatasetConfig(source("b", 1)))
    assert list(splits) == ["train"]
    assert texts(splits["train"]) == ["a0", "a1", "b0"]


@pytest.mark.parametrize(
    ("fractions", "expected"),
    [
        ((0.5, 0.5), ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]),  # TRL's number: 4 rows are half of 8
        ((2, 1), [f"a{n}" for n in range(8)] + ["b0", "b1", "b2", "b3"]),  # 4 rows are a third of 12
        ((0, 1), ["b0", "b1", "b2", "b3"]),
        ((5, 1), [f"a{n}" for n in range(10)] + ["b0", "b1"]),  # 10 rows are five sixths of 12
    ],
)
def test_fractions_are_shares_of_the_mixture(source, fractions, expected):
    a, b = ({"path": source(*s), "fraction": f} for s, f in zip([("a", 10), ("b", 4)], fractions, strict=True))
    assert texts(mixed(a, b)["train"]) == expected


@pytest.mark.parametrize(("rows", "expected"), [(3, 3), ("3", 3), ("50%", 5), ("100%", 10), ("25 %", 2), (0, 0)])
def test_rows_are_a_number_or_a_part_of_those_there(source, rows, expected):
    train = mixed({"path": source("a", 10), "rows": rows}, {"path": source("b", 1)})["train"]
    assert texts(train) == [f"a{n}" for n in range(expected)] + ["b0"]


def test_a_seed_chooses_the_rows(source):
    chosen = [
        texts(mixed({"path": source("a", 50), "rows": 10}, mixture_seed=seed)["train"]) for seed in (1, 1, 2, None)
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    assert chosen[3] == [f"a{n}" for n in range(10)]
    assert len(set(chosen[0])) == 10
    assert chosen[0] == sorted(chosen[0], key=lambda text: int(text[1:]))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("stopping_strategy", [None, "first_exhausted", "all_exhausted"])
def test_probabilities_are_those_of_each_draw(source, stopping_strategy, streaming):
    train = mixed(
        {"path": source("a", 1000), "probability": 3},
        {"path": source("b", 1000), "probability": 1},
        stopping_strategy=stopping_strategy,
        streaming=streaming,
        mixture_seed=7,
    )["train"]
    drawn = names(train.take(1000))
    assert drawn.total() == 1000
    assert 750 - 40 <= drawn["a"] <= 750 + 40  # three standard deviations of a binomial are 41
    again = mixed(
        {"path": source("a", 1000), "probability": 0.75},
        {"path": source("b", 1000), "probability": 0.25},
        stopping_strategy=stopping_strategy,
        streaming=streaming,
        mixture_seed=7,
    )["train"]
    assert texts(again.take(50)) == texts(train.take(50))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("stopping_strategy", "size"),
    # in turn: until the 10 of a are used up; until the 60 of b are, a six times over; each row once
    [(None, 70), ("first_exhausted", 20), ("all_exhausted", 120), ("all_exhausted_without_replacement", 70)],
)
def test_stopping_strategies(source, stopping_strategy, size, streaming):
    train = mixed(
        {"path": source("a", 10)}, {"path": source("b", 60)}, stopping_strategy=stopping_strategy, streaming=streaming
    )["train"]
    rows = texts(train)
    assert abs(len(rows) - size) <= (1 if stopping_strategy == "first_exhausted" and streaming else 0)
    assert (rows[:4] == ["a0", "b0", "a1", "b1"]) == (stopping_strategy is not None)


def test_columns_are_kept_or_renamed(source):
    a = {"path": source("a", 1, "question", n=1, level=2), "columns": {"question": "text", "n": "n"}}
    b = {"path": source("b", 1, n=3, level=4), "columns": ["text", "n"]}
    assert mixed(a, b)["train"].to_list() == [{"text": "a0", "n": 1}, {"text": "b0", "n": 3}]
    assert list(mixed(a, b, streaming=True)["train"]) == [{"text": "a0", "n": 1}, {"text": "b0", "n": 3}]


@pytest.mark.parametrize("streaming", [False, True])
def test_template_variables_of_a_source(source, streaming):
    a = {"path": source("a", 1), "chat_template_kwargs": {"enable_thinking": False}}
    b = {"path": source("b", 1), "chat_template_kwargs": {"effort": "low"}}
    train = mixed(a, b, {"path": source("c", 1)}, streaming=streaming)["train"]
    variables = [row.get("chat_template_kwargs") for row in train]
    assert [v and json.loads(v) for v in variables] == [{"enable_thinking": False}, {"effort": "low"}, None]


def test_rows_for_evaluation(source):
    a, b = {"path": source("a", 30)}, {"path": source("b", 10)}
    splits = mixed(a, b, test_split_size=0.25)
    assert (len(splits["train"]), len(splits["test"])) == (30, 10)
    assert sorted(texts(splits["train"]) + texts(splits["test"])) == sorted(texts(mixed(a, b)["train"]))
    assert texts(splits["test"]) == texts(mixed(a, b, test_split_size=0.25)["test"])
    assert texts(splits["test"]) != texts(mixed(a, b, test_split_size=10, mixture_seed=1)["test"])


def test_rows_that_are_drawn_again_are_not_evaluated_on(source):
    a, b = {"path": source("a", 10)}, {"path": source("b", 60)}
    splits = mixed(a, b, stopping_strategy="all_exhausted", test_split_size=0.1)
    assert len(splits["test"]) == 1 + 6
    assert not set(texts(splits["train"])) & set(texts(splits["test"]))
    assert names(mixed(a, b, stopping_strategy="all_exhausted", test_split_size=5)["test"]) == {"a": 3, "b": 2}


def test_a_stream_keeps_its_first_rows_for_evaluation(source):
    splits = mixed({"path": source("a", 5), "rows": 4}, streaming=True, test_split_size=1)
    assert isinstance(splits, IterableDatasetDict)
    assert texts(splits["test"]) == ["a0"]
    assert texts(splits["train"]) == ["a1", "a2", "a3"]


def test_what_was_taken_is_logged(source, caplog):
    with caplog.at_level(logging.INFO, logger="strop"):
        mixed({"path": source("a", 10)}, {"path": source("b", 60)}, stopping_strategy="all_exhausted")
        mixed({"path": source("a", 10), "rows": 5}, {"path": source("b", 15)})
        mixed({"path": source("a", 10), "probability": 1}, {"path": source("b", 9), "probability": 3}, streaming=True)
    turns, parts, stream = (record.getMessage().splitlines() for record in caplog.records)
    assert [line.partition("]: ")[2] for line in turns[1:]] == [
        "60 rows (50.0% of the mixture)",
        "60 rows (50.0% of the mixture)",
    ]
    assert [line.partition("]: ")[2] for line in parts[1:]] == [
        "5 rows (25.0% of the mixture)",
        "15 rows (75.0% of the mixture)",
    ]
    assert [line.partition("]: ")[2] for line in stream[1:]] == ["probability 0.25", "probability 0.75"]


@pytest.mark.parametrize(
    ("sources", "settings", "message"),
    [
        ([], {}, "The mixture has no data sets"),
        ([{"fraction": 0.5}, {}], {}, "b.jsonl has no fraction, but other data sets of the mixture do"),
        ([{}, {"probability": 1}], {}, "a.jsonl has no probability"),
        ([{"fraction": 0.5}], {}, r"a.jsonl is all\. For part of its rows, use rows: '50%'"),
        ([{"fraction": 0}, {"fraction": 0}], {}, "Every fraction is 0"),
        ([{"fraction": -1}, {"fraction": 1}], {}, "fraction=-1 is below 0"),
        ([{"fraction": 1, "rows": 2}], {}, "fraction and rows are different ways"),
        ([{"rows": "many"}], {}, "rows='many' is neither a number of rows nor a part of them such as '50%'"),
        ([{"rows": "120%"}], {}, "rows='120%' is neither"),
        ([{"rows": -1}], {}, "rows=-1 is neither"),
        ([{"rows": 5}], {}, "a.jsonl has 4 rows in 'train', fewer than rows=5"),
        ([{"colums": ["text"]}], {}, r"no option 'colums'. Did you mean 'columns'\?"),
        ([{"columns": ["txt"]}], {}, r"a.jsonl has no column 'txt', only text. Did you mean 'text'\?"),
        ([{}, {"columns": {"text": "prompt"}}], {}, "Data columns are text in .*a.jsonl, but prompt in .*b.jsonl"),
        ([{"split": "test"}], {}, "a.jsonl has no split 'test', only train"),
        ([{}], {"stopping_strategy": "first"}, r"Did you mean 'first_exhausted'\?"),
        ([{}], {"test_split_size": 0}, "test_split_size=0 keeps no rows"),
        ([{"fraction": 1}, {"fraction": 1}], {"streaming": True}, "number of rows is unknown"),
        ([{"rows": "50%"}], {"streaming": True}, "number of rows is unknown"),
        (
            [{}],
            {"streaming": True, "test_split_size": 0.1},
            "test_split_size=0.1: a stream's number of rows is unknown",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(source, sources, settings, message):
    given = [{"path": source(name, 4), **options} for name, options in zip("ab", sources, strict=False)]
    with pytest.raises(ValueError, match=message):
        mixed(*given, **settings)


def test_a_source_needs_a_path():
    with pytest.raises(ValueError, match=r"has no path: \{'rows': 3\}"):
        DatasetMixtureConfig(datasets=[{"rows": 3}])


def test_a_row_s_own_template_variables_are_not_overwritten(tmp_path):
    Dataset.from_list([{"text": "a", "chat_template_kwargs": "{}"}]).to_json(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="has a column 'chat_template_kwargs'"):
        mixed({"path": str(tmp_path / "a.jsonl"), "chat_template_kwargs": {"x": 1}})
