"""Rows from files, folders and saved data sets, and what is said when they can't be had."""

import json

import pytest
from datasets import Dataset, DatasetDict, IterableDataset, disable_caching, enable_caching

from strop.data.sources import as_conversations, load_rows, renamed

ROWS = [{"prompt": "1 + 1", "completion": "2"}, {"prompt": "2 + 3", "completion": "5"}]


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    yield disable_caching()
    enable_caching()


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        getattr(Dataset.from_list(rows), f"to_{path.suffix[1:]}")(str(path))
    return path


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_file(tmp_path, ending, streaming):
    rows = [{"prompt": "1 + 1", "n": 2}, {"prompt": "2, 3", "n": 5}]
    path = write(tmp_path / f"my data{ending}", rows)
    assert list(load_rows(path, "train", streaming=streaming)) == rows
    splits = load_rows(str(path), streaming=streaming)
    assert list(splits) == ["train"]
    assert list(splits["train"]) == rows


def test_a_slice_of_a_split(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"n": n} for n in range(10)])
    assert load_rows(path, "train[:30%]+train[-1:]")["n"][:] == [0, 1, 2, 9]


def test_text_is_a_row_a_line(tmp_path):
    (tmp_path / "book.txt").write_text("one\ntwo\n")
    assert load_rows(tmp_path / "book.txt", "train")["text"][:] == ["one", "two"]


def test_a_folder_is_split_by_file_names(tmp_path):
    for n, name in enumerate(["train-00000", "train-00001", "dev", "test"]):
        write(tmp_path / f"{name}.jsonl", [{"n": n}])
    splits = load_rows(tmp_path)
    assert {name: rows["n"][:] for name, rows in splits.items()} == {"train": [0, 1], "validation": [2], "test": [3]}
    assert load_rows(tmp_path, "validation")["n"][:] == [2]


def test_a_saved_data_set(tmp_path):
    train, test = Dataset.from_list(ROWS), Dataset.from_list(ROWS[:1])
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")
    train.save_to_disk(tmp_path / "one")
    assert load_rows(tmp_path / "both", "test").to_list() == ROWS[:1]
    assert load_rows(tmp_path / "one", "train").to_list() == ROWS
    assert list(load_rows(tmp_path / "one")) == ["train"]
    stream = load_rows(tmp_path / "both", "train", streaming=True)
    assert isinstance(stream, IterableDataset)
    assert list(stream) == ROWS
    with pytest.raises(ValueError, match=r"both has no split 'tset', only train, test. Did you mean 'test'\?"):
        load_rows(tmp_path / "both", "tset")
    with pytest.raises(ValueError, match=r"split='train\[:1\]'.*only whole splits"):
        load_rows(tmp_path / "both", "train[:1]")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_split_lists_those_there(tmp_path, streaming):
    path = write(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"data.jsonl has no split 'test', only train\."):
        load_rows(path, "test", streaming=streaming)
    path.rename(tmp_path / "train.jsonl")
    write(tmp_path / "dev.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"has no split 'valid', only train, validation. Did you mean 'validation'\?"):
        load_rows(tmp_path, "valid", streaming=streaming)


def test_a_missing_file_names_the_nearest(tmp_path, monkeypatch):
    write(tmp_path / "answers.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"There is no '.*anwsers.jsonl'. Did you mean 'answers.jsonl'\?"):
        load_rows(tmp_path / "anwsers.jsonl")
    with pytest.raises(ValueError, match=r"There is no '.*zzz.csv'. .* holds answers.jsonl\."):
        load_rows(tmp_path / "zzz.csv")
    with pytest.raises(ValueError, match=rf"Did you mean '{tmp_path.name}'\?"):  # the folder is what is mistyped
        load_rows(tmp_path.parent / f"{tmp_path.name}x" / "answers.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"'answers' is no file or folder here, .* Did you mean 'answers.jsonl'\?"):
        load_rows("answers")
    with pytest.raises(ValueError, match="'nobody/answers' is no file or folder here, and no data set of the hub"):
        load_rows("nobody/answers")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"n": 1}\n\n{"n": 2\n{"n": 3}\n', r"a.jsonl:3: not valid JSON .*: \{\"n\": 2\."),
        ("a.jsonl", '{"n": 1}\n[2]\n', r"a.jsonl:2: \[2\] is not an object"),
        ("a.json", '[\n {"n": 1},\n {"n": 2}}\n]', r"a.json:3: not valid JSON .*column 10"),
        ("a.json", '{"n": 1}\n{"n" 2}\n', r"a.json:2: not valid JSON"),
        ("a.jsonl", "", r"a.jsonl is empty"),
        ("a.csv", "p,c\n1,2\n1,2,3\n", r"a.csv can't be read: .*line 3"),
        ("a.parquet", "no parquet", r"a.parquet can't be read: .*Parquet"),
        ("a.xlsx", "?", r"a.xlsx ends in '.xlsx', .* \.jsonl, \.json, \.csv"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path / name, "train")


def test_the_broken_file_of_a_folder_is_named(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "test.jsonl").write_text('{"prompt": "1", "completion": "1"}\n{"prompt"\n')
    with pytest.raises(ValueError, match=r"test.jsonl:2: not valid JSON"):
        load_rows(tmp_path)


def test_options_of_a_hub_data_set_are_refused_for_a_file(tmp_path):
    path = write(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"data.jsonl is one file, so config='main' can't apply"):
        load_rows(path, "train", config="main")


def test_readers_of_datasets_can_be_named(tmp_path):
    files = {"train": str(write(tmp_path / "a.jsonl", ROWS)), "test": str(write(tmp_path / "b.jsonl", ROWS[1:]))}
    assert load_rows("json", "test", data_files=files).to_list() == ROWS[1:]


# Columns


ANSWERS = [
    {"question": "Is ice hot?", "answer": "No.", "level": 1},
    {"question": "Is fire?", "answer": "Yes.", "level": 2},
]


@pytest.mark.parametrize("stream", [False, True])
def test_columns_get_the_names_that_training_knows(stream):
    rows = Dataset.from_list(ANSWERS)
    rows = rows.to_iterable_dataset() if stream else rows
    found = renamed(rows, {"question": "prompt", "answer": "completion"}, "answers")
    assert next(iter(found)) == {"prompt": "Is ice hot?", "completion": "No.", "level": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_plain_rows_become_conversations(stream):
    rows = Dataset.from_list([{"prompt": "Is ice hot?", "completion": "No."}])
    found = as_conversations(rows.to_iterable_dataset() if stream else rows, "answers")
    assert next(iter(found)) == {
        "prompt": [{"role": "user", "content": "Is ice hot?"}],
        "completion": [{"role": "assistant", "content": "No."}],
    }


def test_column_mistakes_are_named():
    rows = Dataset.from_list(ANSWERS)
    with pytest.raises(
        ValueError, match=r"no column 'qestion', only question, answer, level\. Did you mean 'question'"
    ):
        renamed(rows, {"qestion": "prompt"}, "answers")
    with pytest.raises(ValueError, match="has a column 'answer' already"):
        renamed(rows, {"question": "answer"}, "answers")
    with pytest.raises(
        ValueError, match="the columns of answers are question, answer, level; a conversation is made of"
    ):
        as_conversations(rows, "answers")


def test_plain_pairs_become_conversations():
    rows = Dataset.from_list([{"prompt": "Is ice hot?", "chosen": "No.", "rejected": "Yes.", "completion": "mine"}])
    assert as_conversations(rows, "pairs")[0] == {
        "prompt": [{"role": "user", "content": "Is ice hot?"}],
        "chosen": [{"role": "assistant", "content": "No."}],
        "rejected": [{"role": "assistant", "content": "Yes."}],
        "completion": "mine",
    }
