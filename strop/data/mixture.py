"""Several data sets as one: how much of each, in which order, with which names for their columns.

datasets:                                datasets:                          datasets:
  - path: maths.jsonl                      - path: maths.jsonl                - path: maths.jsonl
    rows: 5000        # this many            fraction: 0.7  # of the mixture    probability: 0.75  # of each draw
  - path: chat.parquet                     - path: chat.parquet               - path: chat.parquet
    rows: "50%"       # of those there       fraction: 0.3                      probability: 0.25
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import numpy as np
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    IterableDatasetDict,
    Value,
    concatenate_datasets,
    interleave_datasets,
)

from strop.compat import suggestion
from strop.data.sources import Rows, column_names, load_rows, renamed

logger = logging.getLogger(__name__)

STOPPING_STRATEGIES = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")

FORMAT_COLUMNS = frozenset(
    ["text", "messages", "conversations", "prompt", "completion", "completions", "chosen", "rejected", "input_ids"]
)
"""Columns by which a trainer knows what a row is."""

SPLIT_SEED = 42
"""Seed of the split into train and test, unless the mixture has one."""

SHUFFLE_BUFFER = 10_000
"""Rows of a stream that a seeded choice is made from."""


@dataclass
class DatasetConfig:
    """One source of a mixture. At most one of `fraction`, `rows` and `probability` says how much of it is used."""

    path: str
    """A file, a folder, a data set saved to disk, or a hub id."""

    name: str | None = None
    """Configuration of a hub data set that has several."""

    data_dir: str | None = None
    """Folder within a hub data set."""

    data_files: str | list[str] | dict[str, str] | None = None
    """Files to read where `path` is a hub data set or the name of a reader, such as "json"."""

    split: str = "train"
    """Split to use; map-style sources can be sliced, as in "train[:10%]"."""

    columns: list[str] | dict[str, str] | None = None
    """Columns to keep; a dict from names in the source to names in the mixture keeps those and renames them."""

    fraction: float | None = None
    """Share of the mixture, relative to the other sources' (all have one or none has): 0.7 and 0.3 of sources with 100
    and 90 rows give 100 and 43, the largest mixture in these proportions."""

    rows: int | str | None = None
    """Rows to use of this source: a number, or a part of those there such as "50%"."""

    probability: float | None = None
    """Chance that a row of the mixture is from this source, relative to the others' (all have one or none has)."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template in every row of this source, e.g. {"enable_thinking": false}."""

    def __post_init__(self):
        _check_amount(self)


@dataclass
class DatasetMixtureConfig:
    """A mixture of data sets, used instead of a single one."""

    datasets: list[DatasetConfig] = field(default_factory=list)
    """Sources of the mixture, each with a path and optionally name, split, columns and how much of it to use."""

    streaming: bool = False
    """Read the sources while training instead of loading them first."""

    test_split_size: float | None = None
    """Rows kept for evaluation: a share below 1, or a number (of the first rows if streaming)."""

    stopping_strategy: str | None = None
    """When drawing from the sources in turn, or by their `probability`, ends: "first_exhausted" (the default with
    probabilities), "all_exhausted" (smaller sources start over) or "all_exhausted_without_replacement" (every row
    once). Not set and without probabilities, the sources follow one another."""

    mixture_seed: int | None = None
    """Seed by which rows of a source are chosen and sources drawn from; not set, a source's first rows are used."""

    def __post_init__(self):
        self.datasets = [_source(given) for given in self.datasets]
        if self.stopping_strategy is not None and self.stopping_strategy not in STOPPING_STRATEGIES:
            raise ValueError(
                f"Unknown stopping_strategy {self.stopping_strategy!r}; known: {', '.join(STOPPING_STRATEGIES)}."
                f"{suggestion(self.stopping_strategy, STOPPING_STRATEGIES)}"
            )
        for amount in ("fraction", "probability"):
            _check_all_or_none(self.datasets, amount)
        _check_sizes(self)


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """The mixture as {"train": ...}, and "test" if `test_split_size` keeps rows for it; the same for the same settings.

    What was taken of each source is logged. Raises ValueError for a mixture of nothing, sources without the columns
    named, and sources whose rows are of different kinds.
    """
    config = mixture_config
    if not config.datasets:
        raise ValueError("The mixture has no data sets: there is nothing to load. List them under `datasets`.")
    parts = [_load(source, config) for source in config.datasets]
    _check_same_kind(config.datasets, parts)
    parts = _chosen(config, parts)
    splits = _split_and_mixed(config, parts)
    logger.info(summary(config, parts))
    if config.streaming:
        return IterableDatasetDict(cast(Any, splits))
    return DatasetDict(cast(Any, splits))


def summary(config: DatasetMixtureConfig, parts: Sequence[Rows]) -> str:
    """What the mixture takes of each source, a line each; `parts` are the rows chosen of them."""
    lines = [f"mixture of {len(parts)} data sets"]
    lengths = None if config.streaming else _rows_drawn(config, cast(list[Dataset], parts))
    for i, source in enumerate(config.datasets):
        amount = f"probability {_shares(config, 'probability')[i]:.3g}" if source.probability else "all that it streams"
        if source.rows is not None and not source.probability:
            amount = f"{source.rows} rows"
        if lengths is not None:
            amount = f"{lengths[i]} rows ({lengths[i] / max(sum(lengths), 1):.1%} of the mixture)"
        lines.append(f"  {source.path} [{source.split}]: {amount}")
    return "\n".join(lines)


# Settings


def _source(given: DatasetConfig | dict[str, Any]) -> DatasetConfig:
    """A source, also where it comes from a config file as a mapping."""
    if not isinstance(given, dict):
        return given
    known = [f.name for f in fields(DatasetConfig)]
    for name in given:
        if name not in known:
            raise ValueError(f"A data set of the mixture has no option {name!r}.{suggestion(name, known)}")
    if "path" not in given:
        raise ValueError(f"A data set of the mixture has no path: {given}. Say which file, folder or hub id it is.")
    return DatasetConfig(**given)


def _check_amount(source: DatasetConfig) -> None:
    given = [name for name in ("fraction", "rows", "probability") if getattr(source, name) is not None]
    if len(given) > 1:
        raise ValueError(
            f"{source.path}: {' and '.join(given)} are different ways to say how much of a data set to use. Keep one."
        )
    for name in ("fraction", "probability"):
        value = getattr(source, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{source.path}: {name}={value} is below 0. Use a weight of at least 0.")
    if source.rows is not None:
        _wanted_rows(source, 0)


def _check_all_or_none(sources: list[DatasetConfig], amount: str) -> None:
    weights = [getattr(source, amount) for source in sources]
    missing = [source.path for source, weight in zip(sources, weights, strict=True) if weight is None]
    if not missing or len(missing) == len(sources):
        if sources and not missing and not sum(weights):
            raise ValueError(f"Every {amount} is 0, so the mixture has no rows. Give at least one data set a weight.")
        return
    raise ValueError(
        f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'} no {amount}, but other data sets of the "
        f"mixture do: one share means nothing without the others. Give every data set a {amount}, or none."
    )


def _check_sizes(config: DatasetMixtureConfig) -> None:
    first, size = next(iter(config.datasets), None), config.test_split_size
    if first and len(config.datasets) == 1 and first.fraction not in (None, 1):
        raise ValueError(
            f"fraction={first.fraction} is a share of the mixture, of which {first.path} is all. For part of its rows, "
            f"use rows: '{first.fraction:.0%}'."
        )
    if size is not None and size <= 0:
        raise ValueError(
            f"test_split_size={size} keeps no rows. Use a share below 1, a number of rows, or leave it out."
        )
    if config.streaming:
        _check_stream(config)


def _check_stream(config: DatasetMixtureConfig) -> None:
    """Refuse shares of what has no known size."""
    for source in config.datasets:
        if source.fraction is not None or isinstance(source.rows, str):
            raise ValueError(
                f"{source.path}: a stream's number of rows is unknown, so no share of it can be taken. Use rows: "
                f"<number>, or probability, or streaming: false."
            )
    if config.test_split_size is not None and config.test_split_size < 1:
        raise ValueError(
            f"test_split_size={config.test_split_size}: a stream's number of rows is unknown, so no share of it can be "
            f"kept. Use a number of rows."
        )


def _shares(config: DatasetMixtureConfig, amount: str) -> list[float]:
    weights = [getattr(source, amount) for source in config.datasets]
    return [weight / sum(weights) for weight in weights]


# Sources


def _load(source: DatasetConfig, config: DatasetMixtureConfig) -> Rows:
    rows = load_rows(
        source.path, source.split, source.name, config.streaming, data_dir=source.data_dir, data_files=source.data_files
    )
    rows = _with_columns(source, cast(Rows, rows))
    return _with_template_kwargs(source, rows) if source.chat_template_kwargs else rows


def _with_columns(source: DatasetConfig, rows: Rows) -> Rows:
    if source.columns is None:
        return rows
    mapping = source.columns if isinstance(source.columns, dict) else {name: name for name in source.columns}
    return renamed(rows, mapping, source.path).select_columns(list(mapping.values()))


def _with_template_kwargs(source: DatasetConfig, rows: Rows) -> Rows:
    """The rows with the source's template variables, as JSON so that sources may have different ones."""
    column, value = "chat_template_kwargs", json.dumps(source.chat_template_kwargs)
    if column in column_names(rows):
        raise ValueError(
            f"{source.path} has a column {column!r}, so its rows say themselves what the template gets. Leave out the "
            f"source's {column}, or the column."
        )
    if isinstance(rows, Dataset):
        return rows.add_column(column, [value] * len(rows))  # pyright: ignore[reportCallIssue]
    features = rows.features and Features({**rows.features, column: Value("string")})
    return rows.map(lambda row: {**row, column: value}, features=features)


def _check_same_kind(sources: list[DatasetConfig], parts: list[Rows]) -> None:
    kinds = [", ".join(sorted(FORMAT_COLUMNS.intersection(column_names(part)))) or "none known" for part in parts]
    for source, kind in zip(sources, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"Data columns are {kinds[0]} in {sources[0].path}, but {kind} in {source.path}: one run trains one "
                f"kind of rows. Rename them with `columns: {{name in the data set: name in the mixture}}`."
            )


# How much of each


def _chosen(config: DatasetMixtureConfig, parts: list[Rows]) -> list[Rows]:
    """Of each source the rows that its `rows`, or all sources' `fraction`, ask for."""
    if config.datasets[0].fraction is not None:
        numbers: list[int | None] = list(_rows_by_fraction(config, [len(cast(Dataset, part)) for part in parts]))
    else:
        numbers = [_number_of_rows(source, part) for source, part in zip(config.datasets, parts, strict=True)]
    return [
        part if number is None else _some(part, number, config.mixture_seed)
        for part, number in zip(parts, numbers, strict=True)
    ]


def _rows_by_fraction(config: DatasetMixtureConfig, available: list[int]) -> list[int]:
    """Rows of each source in the largest mixture of the given proportions: shares w of min(available / w) rows."""
    shares = _shares(config, "fraction")
    total = min(rows / share for rows, share in zip(available, shares, strict=True) if share)
    return [min(round(total * share), rows) for rows, share in zip(available, shares, strict=True)]


def _number_of_rows(source: DatasetConfig, part: Rows) -> int | None:
    if source.rows is None or isinstance(part, IterableDataset):
        return cast(int | None, source.rows)
    number = _wanted_rows(source, len(part))
    if number > len(part):
        raise ValueError(f"{source.path} has {len(part)} rows in {source.split!r}, fewer than rows={source.rows}.")
    return number


def _wanted_rows(source: DatasetConfig, available: int) -> int:
    """The number that `rows` means, of so many available ones."""
    wanted = str(source.rows)
    try:
        number = round(float(wanted[:-1]) / 100 * available) if wanted.endswith("%") else int(wanted)
        if number >= 0 and (not wanted.endswith("%") or 0 <= float(wanted[:-1]) <= 100):
            return number
    except ValueError:
        pass
    raise ValueError(
        f"{source.path}: rows={source.rows!r} is neither a number of rows nor a part of them such as '50%'."
    )


def _some(part: Rows, number: int, seed: int | None) -> Rows:
    """The first rows; with a seed any, of a map-style set in their order there."""
    if seed is None:
        return part.take(number)
    if isinstance(part, IterableDataset):
        return part.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER).take(number)
    return part.select(np.sort(np.random.default_rng(seed).permutation(len(part))[:number]))


# Mixing


def _split_and_mixed(config: DatasetMixtureConfig, parts: list[Rows]) -> dict[str, Rows]:
    size = config.test_split_size
    if size is None:
        return {"train": _mixed(config, parts)}
    if not _draws(config):
        train, test = _train_and_test(config, concatenate_datasets(cast(Any, parts)), size)
        return {"train": train, "test": test}
    # a source that starts over must not put its rows into both
    share = size if size < 1 else None
    sizes = [share or _nth_part(int(size), len(parts), i) for i in range(len(parts))]
    pairs = [_train_and_test(config, part, n) for part, n in zip(parts, sizes, strict=True)]
    trains, tests = [train for train, _ in pairs], [test for _, test in pairs]
    return {"train": _mixed(config, trains), "test": concatenate_datasets(cast(Any, tests))}


def _nth_part(total: int, num_parts: int, n: int) -> int:
    return total // num_parts + (n < total % num_parts)


def _train_and_test(config: DatasetMixtureConfig, rows: Rows, size: float) -> tuple[Rows, Rows]:
    if isinstance(rows, IterableDataset):
        return rows.skip(int(size)), rows.take(int(size))
    seed = SPLIT_SEED if config.mixture_seed is None else config.mixture_seed
    parts = rows.train_test_split(test_size=size if size < 1 else int(size), seed=seed)
    return parts["train"], parts["test"]


def _draws(config: DatasetMixtureConfig) -> bool:
    """Whether rows of the sources alternate, by chance or in turn, instead of following one another."""
    return config.stopping_strategy is not None or config.datasets[0].probability is not None


def _mixed(config: DatasetMixtureConfig, parts: list[Any]) -> Any:
    if not _draws(config):
        return concatenate_datasets(parts)
    by_chance = config.datasets[0].probability is not None
    return interleave_datasets(
        parts,
        probabilities=_shares(config, "probability") if by_chance else None,
        seed=config.mixture_seed or 0,
        stopping_strategy=cast(Any, config.stopping_strategy or "first_exhausted"),
    )


def _rows_drawn(config: DatasetMixtureConfig, parts: list[Dataset]) -> list[int]:
    """How many rows of the mixture are from each source, counting those drawn again."""
    if not _draws(config):
        return [len(part) for part in parts]
    origins = [Dataset.from_dict({"source": np.full(len(part), i)}) for i, part in enumerate(parts)]
    return np.bincount(_mixed(config, origins).with_format("numpy")["source"][:], minlength=len(parts)).tolist()
