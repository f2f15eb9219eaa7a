"""Answers to a prompt, compared, labelled or ranked: rows to `prompt_ids` and `<side>_ids`, counted and cached.

Prompt and answer are tokenised as one text, so that their ids together are those of the whole; the prompt ends where
its answers part, at the latest where the row says. Preparing twice is preparing once.
"""

import logging
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from strop.data.formats import CHECKED_ROWS
from strop.data.preference_rows import COUNTS, PreferenceMaker, PreferenceRecipe, token_columns
from strop.data.prepare import HOPELESS_ROWS, AnyRows, as_columns, as_dataset, fingerprint, older_objects_frozen
from strop.data.report import GONE, Fate, PreferenceReport
from strop.data.sides import (
    LABELLED,
    LABELLED_MISMATCHED,
    MISMATCHED,
    PAIRS,
    PAIRS_WITH_MARGIN,
    RANKED,
    TRIPLES,
    PreferenceCollator,
    PreferenceFormat,
)

__all__ = [
    "LABELLED",
    "LABELLED_MISMATCHED",
    "PAIRS",
    "PAIRS_WITH_MARGIN",
    "RANKED",
    "TRIPLES",
    "PreferenceCollator",
    "PreferenceFormat",
    "prepare_preference",
]

logger = logging.getLogger(__name__)

Counts = dict[str, np.ndarray]

WARNINGS = {
    "untrainable_rows": "{0.untrainable_rows} of {0.rows_in} rows had no room for their completions after the prompt, "
    "or nothing in them that is predicted, and were dropped",
    "dropped_rows": "{0.dropped_rows} of {0.rows_in} rows were too long and were dropped",
    "truncated_completions": "{0.truncated_completions} completions were truncated, {0.lost_ends} of them without the "
    "token that ends them, {0.tokens_lost} tokens lost in all",
    "truncated_prompts": "of {0.truncated_prompts} of {0.rows_in} rows the start of the prompt was cut off",
    "merged_boundaries": "in {0.merged_boundaries} of {0.rows_in} rows one token holds the end of the prompt and the "
    "start of a completion; it belongs to the completion",
    "equal_rows": "in {0.equal_rows} of {0.rows_out} rows the completions have the same tokens, so there is nothing to "
    "prefer",
    "empty_sides": "in {0.empty_sides} of {0.rows_in} rows a completion says nothing",
}
"""What is warned about where a report counts any of it."""


def prepare_preference(
    dataset: AnyRows,
    tokenizer: PreTrainedTokenizerBase,
    args: Any,
    wanted: PreferenceFormat = PAIRS,
    name: str = "train",
    refuses: bool = True,
) -> tuple[Dataset | IterableDataset, PreferenceReport]:
    """`dataset` as the columns of `wanted`, and what was done to it; one that has them comes back as it is.

    `args` has the fields of PreferenceArguments. For what rows may be see `strop.data.prompts`; they may be tokenised,
    too: `prompt_ids` and `<side>_ids`, or without prompt_ids whole `<side>_ids` or `<side>_input_ids`. A stream is
    prepared as it is read, and its report fills up meanwhile.

    Raises ValueError for rows it can't read (with their number) and, if it `refuses`, when no row is left, and when
    more than half of the rows have nothing to prefer.
    """
    dataset = as_dataset(dataset, name)
    report = PreferenceReport(name)
    maker = maker_for(dataset, tokenizer, PreferenceRecipe.of(args), wanted, name)
    if isinstance(dataset, IterableDataset):
        return _prepared_stream(dataset, maker, report), report
    if not _counts_as_prepared(dataset, maker, report):
        dataset = _prepared_set(dataset, maker, report, args)
    if refuses:
        _raise_if_nothing_to_learn(report, maker)
    _warn(report, set())
    logger.info("%s", report)
    return dataset, report


def maker_for(dataset, tokenizer, recipe: PreferenceRecipe, wanted: PreferenceFormat, name: str) -> PreferenceMaker:
    """What prepares `dataset`, after a look at its first rows."""
    rows = list(islice(dataset, CHECKED_ROWS))
    if not rows:
        raise ValueError(f"the {name} data set has no rows")
    columns = as_columns(rows)
    is_tokenised = bool(token_columns(rows[0], wanted))
    logps = [f"ref_{side}_logps" for side in wanted.sides if is_tokenised]
    maker = PreferenceMaker(
        tokenizer,
        recipe,
        wanted,
        name,
        extras=tuple(extra for extra in wanted.extras if extra in columns or extra == "label"),
        ref_logps=tuple(column for column in logps if column in columns),
    )
    maker(columns, range(len(rows)))
    maker.check_settings(rows[0])
    return maker


def _features(maker: PreferenceMaker, dataset: Dataset | IterableDataset, counts: bool) -> Features:
    ids = List(Value("int32"))
    features: dict[str, Any] = {"prompt_ids": ids}
    features |= {f"{side}_ids": List(ids) if maker.wanted.ranked else ids for side in maker.wanted.written}
    features |= {extra: Value("bool" if extra == "label" else "float32") for extra in maker.extras}
    logps = List(List(Value("float32"))) if maker.wanted.ranked else List(Value("float32"))
    features |= {column: (dataset.features or {}).get(column, logps) for column in maker.ref_logps}
    return Features(features | ({name: Value("int32") for name in COUNTS} if counts else {}))


# Map-style data sets


def _prepared_set(dataset: Dataset, maker: PreferenceMaker, report: PreferenceReport, args: Any) -> Dataset:
    with older_objects_frozen():
        counted = dataset.map(
            maker,
            batched=True,
            with_indices=True,
            remove_columns=dataset.column_names,
            num_proc=args.dataset_num_proc,
            features=_features(maker, dataset, counts=True),
            new_fingerprint=fingerprint(dataset, maker.tokenizer, *maker.key),
            desc=f"Preparing {report.name}",
        )
    counts = {name: counted.data.column(name).to_numpy() for name in COUNTS}
    report.count_rows(counts, rows_in=len(dataset))
    kept = counted.remove_columns(list(COUNTS))
    gone = counts["fate"] & int(GONE) != 0
    kept = kept.select(np.flatnonzero(~gone)) if gone.any() else kept
    return _with_mismatched(kept, maker) if MISMATCHED in maker.wanted.sides and len(kept) else kept


def _counts_as_prepared(dataset: Dataset, maker: PreferenceMaker, report: PreferenceReport) -> bool:
    """Whether nothing is left to do to any row; if so, they are counted."""
    wanted = maker.wanted
    if not {*wanted.columns, *maker.extras} <= set(dataset.column_names):
        return False
    if "label" in maker.extras and dataset.features["label"].dtype != "bool":
        return False
    tables = []
    for table in dataset.select_columns(list(wanted.columns)).with_format("arrow").iter(10_000):
        counts = _counts_of(table, maker)
        if counts is None:
            return False
        tables.append(counts)
    for counts in tables:
        report.count_rows(counts, rows_in=len(counts["fate"]))
    return True


def _counts_of(table: pa.Table, maker: PreferenceMaker) -> Counts | None:
    """`COUNTS` of rows that are prepared; None where one of them is not."""
    prompt = _lengths(table.column("prompt_ids"))
    columns = [table.column(f"{side}_ids").combine_chunks() for side in maker.wanted.written]
    if maker.wanted.ranked:
        per_row, inner = _lengths(columns[0]), _lengths(columns[0].flatten())
        if per_row.min() < 2:
            return None
        starts = np.cumsum(per_row) - per_row
        longest, shortest = (f.reduceat(inner, starts) for f in (np.maximum, np.minimum))
        total = np.add.reduceat(inner, starts)
    else:
        lengths = np.stack([_lengths(column) for column in columns])
        per_row, total = np.full(len(table), len(columns)), lengths.sum(0)
        longest, shortest = lengths.max(0), lengths.min(0)
    others = _lengths(table.column(f"{MISMATCHED}_ids")) if MISMATCHED in maker.wanted.sides else longest
    if (shortest <= (prompt == 0)).any() or not maker.recipe.holds(prompt, np.maximum(longest, others)):
        return None
    nothing = np.zeros_like(prompt)
    fates = nothing.copy()
    if not maker.is_labelled:
        for i in np.flatnonzero(longest == shortest if len(columns) < 3 else lengths[0] == lengths[1]):
            sides = [column[i].as_py() for column in columns]
            sides = sides[0] if maker.wanted.ranked else sides[:2]
            fates[i] = int(Fate.EQUAL) * all(ids == sides[0] for ids in sides)
    trained = total - per_row * (prompt == 0)
    values = (fates, prompt + longest, prompt, prompt + total, trained, nothing, nothing, nothing)
    return dict(zip(COUNTS, values, strict=True))


def _lengths(lists: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _raise_if_nothing_to_learn(report: PreferenceReport, maker: PreferenceMaker) -> None:
    """Refuse a data set of which nothing is left, or of which most rows have nothing to prefer."""
    name, recipe = report.name, maker.recipe
    if not report.rows_out and report.dropped_rows:
        raise ValueError(
            f"no row of the {name} data set is left: {report.dropped_rows} of {report.rows_in} are longer than "
            f"max_length={recipe.max_length} (half of all have more than {report.percentile(50)} tokens) and "
            f'overlong="drop" drops them'
        )
    if not report.rows_out and recipe.holds(*recipe.capped(report.longest_prompt, 1)):
        raise ValueError(
            f"in none of the {report.rows_in} rows of the {name} data set has every completion a token that is "
            "predicted. Look at the rows with `strop inspect`"
        )
    if not report.rows_out:
        raise ValueError(
            f"no row of the {name} data set has room for its completions within max_length={recipe.max_length}: the "
            f"longest prompt has {report.longest_prompt} tokens. Raise max_length, or set truncation_mode="
            '"keep_end", max_prompt_length or shorter prompts'
        )
    if 2 * report.equal_rows > report.rows_out:
        raise ValueError(
            f"in {report.equal_rows} of {report.rows_out} rows of the {name} data set the completions have the same "
            f"tokens within max_length={recipe.max_length}, max_completion_length={recipe.max_completion_length} "
            f"({report.truncated_completions} completions were cut), so there is nothing to prefer. Raise the limits, "
            "or look at the rows with `strop inspect`"
        )


def _warn(report: PreferenceReport, told: set[str]) -> None:
    """One line for each thing about a data set that its owner should know, unless it is among those `told`."""
    for count, message in WARNINGS.items():
        if getattr(report, count) and count not in told:
            logger.warning("%s: %s", report.name, message.format(report))
            told.add(count)


# Another row's completion


def partners(prompts: Sequence[bytes], name: str) -> np.ndarray:
    """For each row the index of one with another prompt, whose completion it is to be scored with.

    It is the row at the same place in the run of equal prompts before, around the end, so that completions to one
    prompt, good and bad, each meet another prompt, whatever batch they come in. With a single prompt, rows to train
    on are refused by a ValueError, and others keep their own completion.
    """
    starts = [i for i, prompt in enumerate(prompts) if i == 0 or prompt != prompts[i - 1]]
    if len(starts) < 2 and name != "train":
        logger.warning("%s: all rows have one prompt, so kl is estimated on their own completions", name)
        return np.arange(len(prompts))
    if len(starts) < 2:
        raise ValueError(
            f"all {len(prompts)} rows of the {name} data set that are prepared together have one prompt, so there "
            "is no completion of another one to estimate the divergence with. Add rows with other prompts, or mix "
            "them: a stream is prepared 1000 rows at a time"
        )
    lengths = np.diff([*starts, len(prompts)])
    before = np.arange(len(starts)) - 1
    if prompts[starts[0]] == prompts[starts[-1]]:
        before[0] -= 1
    run = np.repeat(np.arange(len(starts)), lengths)
    place = np.arange(len(prompts)) - np.array(starts)[run]
    return np.array(starts)[before[run]] + place % lengths[before[run]]


def _keys(prompts: pa.Array | pa.ChunkedArray) -> list[bytes]:
    """Each prompt as something that equals itself only."""
    lists = prompts.combine_chunks() if isinstance(prompts, pa.ChunkedArray) else prompts
    ids = lists.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum(_lengths(lists))
    return [ids[start:end].tobytes() for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class Mismatcher:
    """Adds to each row of a batch the completion of its partner in the whole data set, cut to what it has room for."""

    def __init__(self, rows: Dataset, maker: PreferenceMaker):
        self.rows = rows.with_format("arrow")
        self.recipe = maker.recipe
        tables = self.rows.select_columns(["prompt_ids"]).iter(10_000)
        self.partners = partners([key for table in tables for key in _keys(table.column("prompt_ids"))], maker.name)

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        others = self.rows[self.partners[indices].tolist()].column("completion_ids").to_pylist()
        return {f"{MISMATCHED}_ids": mismatched(batch["prompt_ids"], others, self.recipe)}


def mismatched(prompts: Sequence[list[int]], others: Sequence[list[int]], recipe: PreferenceRecipe) -> list[list[int]]:
    """`others`, cut to what there is room for after each prompt."""
    return [
        ids[: None if recipe.max_length is None else recipe.max_length - len(prompt)]
        for prompt, ids in zip(prompts, others, strict=True)
    ]


def _with_mismatched(kept: Dataset, maker: PreferenceMaker) -> Dataset:
    column = f"{MISMATCHED}_ids"
    stale = f"ref_{MISMATCHED}_logps"
    if stale in kept.column_names:
        raise ValueError(
            f"the {maker.name} data set has {stale}, but its completions to other prompts have to be chosen or cut "
            "anew within the limits. Remove the column, or give the limits it was made with"
        )
    return kept.map(
        Mismatcher(kept, maker),
        batched=True,
        with_indices=True,
        features=Features({**kept.features, column: List(Value("int32"))}),
        new_fingerprint=fingerprint(kept, maker.tokenizer, *maker.key, MISMATCHED),
        desc=f"Mixing prompts and completions of {maker.name}",
    )


# Streams


def _prepared_stream(dataset: IterableDataset, maker: PreferenceMaker, report: PreferenceReport) -> IterableDataset:
    features = _features(maker, dataset, counts=False)
    if MISMATCHED in maker.wanted.sides:
        features[f"{MISMATCHED}_ids"] = List(Value("int32"))
    rows = list(islice(dataset, CHECKED_ROWS))
    trial = PreferenceStream(maker, PreferenceReport(maker.name))
    trial.count(maker(as_columns(rows), range(len(rows))), len(rows))
    if len(rows) < CHECKED_ROWS:
        _raise_if_nothing_to_learn(trial.report, maker)
    return dataset.map(
        PreferenceStream(maker, report),
        batched=True,
        with_indices=True,
        remove_columns=dataset.column_names or list(next(iter(dataset))),
        features=features,
    )


class PreferenceStream:
    """A PreferenceMaker that counts as rows pass and leaves out those without tokens."""

    def __init__(self, maker: PreferenceMaker, report: PreferenceReport):
        self.maker = maker
        self.report = report
        self.told: set[str] = set()
        """What was warned about already."""
        self.before: dict[str, list] | None = None
        """The last rows of the batch before, for rows that are alone with their prompt."""

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        table = self.maker(batch, indices)
        fates = self.count(table, len(indices))
        if self.report.rows_in >= HOPELESS_ROWS:
            _raise_if_nothing_to_learn(self.report, self.maker)
        _warn(self.report, self.told)
        kept = table.drop_columns(list(COUNTS)).filter(pa.array(fates & int(GONE) == 0)).to_pydict()
        return self._mismatched(kept) if MISMATCHED in self.maker.wanted.sides and kept["prompt_ids"] else kept

    def count(self, table: pa.Table, rows_in: int) -> np.ndarray:
        """Add to the report the rows of `table`, made of `rows_in`; what became of each comes back."""
        counts = {name: table.column(name).to_numpy() for name in COUNTS}
        self.report.count_rows(counts, rows_in=rows_in)
        return counts["fate"]

    def _mismatched(self, kept: dict[str, list]) -> dict[str, list]:
        prompts, completions = list(kept["prompt_ids"]), list(kept["completion_ids"])
        lone = all(prompt == prompts[0] for prompt in prompts)
        if lone and self.before is not None:
            prompts, completions = prompts + self.before["prompt_ids"], completions + self.before["completion_ids"]
        others = partners([np.array(prompt).tobytes() for prompt in prompts], self.maker.name)
        if not lone:
            self.before = {name: kept[name][-1:] for name in ("prompt_ids", "completion_ids")}
        chosen = [completions[i] for i in others[: len(kept["prompt_ids"])]]
        cut = mismatched(kept["prompt_ids"], chosen, self.maker.recipe)
        return kept | {f"{MISMATCHED}_ids": cut}
