"""Rows by name: a file, a folder of files, a data set saved to disk, or one of the hub.

    load_rows("answers.jsonl")                      DatasetDict with the split "train"
    load_rows("data/", split="validation")          rows of data/validation.jsonl, data/dev-00000.parquet, ...
    load_rows("trl-lib/Capybara", "train[:100]")    the hub, or what its cache holds

Nothing of a stream is read before its first row is asked for, so an unreadable file shows only then.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from strop.compat import suggestion

Rows: TypeAlias = Dataset | IterableDataset
Splits: TypeAlias = DatasetDict | IterableDatasetDict

READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""Ending of a file -> who reads it in `datasets`. A .json file holds a list of rows, or a row a line."""

SAVED = ("dataset_dict.json", "state.json")
"""The files by which a folder is known as written by `save_to_disk`, of several splits or of one."""


def load_rows(
    name_or_path: str | Path,
    split: str | None = None,
    config: str | None = None,
    streaming: bool = False,
    data_dir: str | None = None,
    data_files: Any = None,
) -> Rows | Splits:
    """The rows of `split`, or a dict of all splits where none is named.

    `name_or_path` is a file (.jsonl, .json, .csv, .parquet, .arrow, .txt: its rows are the split "train"), a folder of
    such files (split by their names: train, validation or dev, test or eval), a folder written by `save_to_disk`, or
    else a hub id; `config`, `data_dir` and `data_files` go to `datasets.load_dataset`.

    Raises ValueError for a path that isn't there (naming the nearest that is), a file that can't be read (naming the
    line), and a split that doesn't exist (naming those that do).
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir() and any((path / name).exists() for name in SAVED):
        return _saved(path, split, streaming)
    _check_path(path, str(name_or_path))
    options = {"config": config, "data_dir": data_dir, "data_files": data_files}
    if path.is_file():
        reader = _reader(path)
        if any(options.values()):
            given = ", ".join(f"{k}={v!r}" for k, v in options.items() if v)
            raise ValueError(f"{path} is one file, so {given} can't apply to it. Leave that out, or name the folder.")
        return _load(reader, split, streaming, data_files=str(path))
    return _load(str(path) if path.is_dir() else str(name_or_path), split, streaming, **options)


def column_names(rows: Rows) -> list[str]:
    """The columns; those of a stream may only be known from its first row."""
    return list(rows.column_names or next(iter(rows), {}))


def renamed(rows: Rows, columns: Mapping[str, str], name: str) -> Rows:
    """`rows` of the data set `name` with the columns that `columns` has called as it says; others keep their names."""
    there = column_names(rows)
    for old, new in columns.items():
        if old not in there:
            raise ValueError(f"{name} has no column {old!r}, only {', '.join(there)}.{suggestion(old, there)}")
        if new in there and new not in columns:
            raise ValueError(f"{name} has a column {new!r} already, so {old!r} can't be called so too.")
    return rows.rename_columns({old: new for old, new in columns.items() if old != new})


def as_conversations(rows: Rows, name: str) -> Rows:
    """Plain prompts as one message of the user, completions of any kind as one of the assistant, for a template."""
    there = column_names(rows)
    said = ("chosen", "rejected", "reference") if "chosen" in there else ("completion",)
    completions = [column for column in said if column in there]
    if "prompt" not in there or not completions:
        raise ValueError(
            f"the columns of {name} are {', '.join(there)}; a conversation is made of 'prompt' and 'completion' (or "
            "'chosen' and 'rejected'). Rename yours first, e.g. --dataset_columns "
            '\'{"question": "prompt", "answer": "completion"}\'.'
        )
    roles = {"prompt": "user", **dict.fromkeys(completions, "assistant")}

    def converse(row: dict[str, Any]) -> dict[str, Any]:
        for column in roles:
            if not isinstance(row[column], str):
                raise ValueError(f"column {column!r} of {name} holds {type(row[column]).__name__}, not text to wrap.")
        return {column: [{"role": role, "content": row[column]}] for column, role in roles.items()}

    return rows.map(converse)


def _check_path(path: Path, name: str) -> None:
    """Refuse what looks like a path but isn't there, before the hub is asked for it."""
    looks_local = path.suffix in READERS or name.startswith((".", "/", "~")) or name.endswith("/")
    if looks_local and not path.exists():
        raise ValueError(f"There is no {name!r}.{_nearest(path)}")


def _nearest(path: Path) -> str:
    """What a mistyped path may have meant; the first folder on the way that is missing is the mistake."""
    while not path.parent.exists():
        path = path.parent
    here = sorted(entry.name for entry in path.parent.iterdir())
    close = suggestion(path.name, here)
    rows = [name for name in here if Path(name).suffix in READERS]
    if close or not rows:
        return close or f" {path.parent.resolve()} holds no file of rows ({' '.join(READERS)})."
    return f" {path.parent.resolve()} holds {', '.join(rows[:8])}{' ...' if len(rows) > 8 else ''}."


def _reader(path: Path) -> str:
    if path.suffix not in READERS:
        raise ValueError(
            f"{path} ends in {path.suffix or 'nothing'!r}, so it isn't known how to read it. Files of rows are "
            f"{', '.join(READERS)}."
        )
    return READERS[path.suffix]


def _load(name: str, split: str | None, streaming: bool, config: str | None = None, **files: Any) -> Rows | Splits:
    try:
        return load_dataset(name, config, split=split, streaming=streaming, **files)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"{name!r} is no file or folder here, and no data set of the hub that can be reached: {error}"
            f"{_nearest(Path(name)) if '/' not in name else ''}"
        ) from error
    except (DatasetGenerationError, StopIteration, pa.ArrowInvalid) as error:
        raise ValueError(_unreadable(_local_files(name, files.get("data_files")), error)) from error
    except ValueError:
        if split is not None:  # a stream tells which splits there are without reading them
            _check_split(split, load_dataset(name, config, streaming=True, **files), files.get("data_files") or name)
        raise


def _saved(path: Path, split: str | None, streaming: bool) -> Rows | Splits:
    """A data set written by `save_to_disk`; one without splits counts as "train"."""
    saved = load_from_disk(path)
    splits = saved if isinstance(saved, DatasetDict) else DatasetDict({str(saved.split or "train"): saved})
    if split is not None and split not in splits:
        _check_split(split, splits, str(path))
        raise ValueError(f"split={split!r}: {path} was saved to disk, where only whole splits can be named.")
    chosen = splits if split is None else splits[split]
    if not streaming:
        return chosen
    if isinstance(chosen, Dataset):
        return chosen.to_iterable_dataset()
    return IterableDatasetDict({name: rows.to_iterable_dataset() for name, rows in chosen.items()})


def _check_split(split: str, splits: Iterable[Any], owner: Any) -> None:
    """Refuse a split that isn't there. `split` may join and slice several, as in "train[:10%]+test"."""
    known = [str(name) for name in splits]
    for part in split.split("+"):
        wanted = re.sub(r"\[.*", "", part).strip()
        if wanted not in known:
            raise ValueError(f"{owner} has no split {wanted!r}, only {', '.join(known)}.{suggestion(wanted, known)}")


# What is wrong with a file


def _local_files(name: str, data_files: Any) -> list[Path]:
    given = data_files or []
    if isinstance(given, dict):
        given = [file for files in given.values() for file in ([files] if isinstance(files, str) else files)]
    files = [Path(file) for file in ([given] if isinstance(given, str) else given)]
    if not files and Path(name).is_dir():
        files = sorted(Path(name).rglob("*"))
    return [file for file in files if file.is_file()]


def _unreadable(files: list[Path], error: Exception) -> str:
    """Which line of which file is broken; what the reader said, where that can't be told."""
    for file in files:
        if READERS.get(file.suffix) == "json" and (fault := _json_fault(file)):
            return fault
        if not file.stat().st_size:
            return f"{file} is empty: there are no rows in it."
    where = ", ".join(map(str, files)) or "The data set"
    return f"{where} can't be read: {error.__cause__ or error}"


def _json_fault(path: Path) -> str | None:
    """What is wrong with a file of rows in JSON, and at which line; None if nothing is."""
    with path.open(encoding="utf-8") as file:
        start = file.read(1024).lstrip()[:1]
    return _list_fault(path) if start == "[" and path.suffix == ".json" else next(_line_faults(path), None)


def _list_fault(path: Path) -> str | None:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        return f"{path}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno}). Mend the line."
    wrong = next((i for i, row in enumerate(rows) if not isinstance(row, dict)), None)
    return None if wrong is None else f"{path}: row {wrong} is {rows[wrong]!r:.60}, not an object with named columns."


def _line_faults(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                yield (
                    f"{path}:{number}: not valid JSON ({error.msg}, column {error.colno}): {line.strip():.60}. "
                    f"A .jsonl file holds one object a line. Mend or remove the line."
                )
                continue
            if not isinstance(row, dict):
                yield f"{path}:{number}: {line.strip():.60} is not an object with named columns. Mend or remove it."
