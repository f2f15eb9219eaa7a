"""The preparation of a data set: rows in any format to `input_ids` and `labels`, counted, cached and packed.

Preparing twice is preparing once: rows that are prepared, packed or cut to length already come back as they are.
"""

import gc
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher, generate_random_fingerprint
from transformers import PreTrainedTokenizerBase

import strop
from strop.data.collate import IGNORE
from strop.data.formats import CHECKED_ROWS, Format, at_row, detect, validate
from strop.data.pack import pack_dataset
from strop.data.recipe import COUNTS, FormattingFunc, Recipe, RowMaker, check_targets, formatted
from strop.data.report import GONE, PreparationReport

logger = logging.getLogger(__name__)

AnyRows = Any
"""A Dataset or IterableDataset, of the datasets library or of torch, or a list of dicts."""
HOPELESS_ROWS = 1000
"""A stream whose first rows, this many, are all dropped is given up."""

WARNINGS = {
    "untrainable_rows": "{0.untrainable_rows} of {0.rows_in} rows had no trainable token after truncation and were "
    "dropped",
    "truncated_rows": "{0.truncated_rows} of {0.rows_in} rows were truncated, {0.tokens_lost} tokens lost",
    "merged_boundaries": "in {0.merged_boundaries} of {0.rows_in} rows one token holds the end of the prompt and the "
    "start of the completion; it is trained",
    "rewritten_rows": "in {0.rewritten_rows} of {0.rows_in} rows the chat template renders earlier turns otherwise "
    "than the model will have said them, so they are trained in a form it never generates; "
    'train_on_turns="expand" renders each turn as at inference',
}
"""What is warned about where a report counts any of it."""


class Maker(Protocol):
    """What makes tables of input_ids, labels and `COUNTS` of batches of rows."""

    tokenizer: PreTrainedTokenizerBase
    recipe: Any
    """Its settings, with a max_length."""
    name: str

    @property
    def key(self) -> tuple[str, ...]:
        """What the rows it makes depend on, beside its tokenizer."""

    def __call__(self, batch: Mapping[str, Sequence], indices: Sequence[int]) -> pa.Table: ...


PREPARED = "prepared by strop"
"""Left in a data set's description, so that shuffling it once is enough."""


def prepare(
    dataset: AnyRows,
    tokenizer: PreTrainedTokenizerBase,
    args: Any,
    *,
    formatting_func: FormattingFunc | None = None,
    name: str = "train",
    packing: bool = False,
) -> tuple[Dataset | IterableDataset, PreparationReport]:
    """The data set as columns input_ids and labels (and seq_lengths if packed), and what was done to it.

    `args` has the fields of DataArguments, PackingArguments and TargetArguments. Rows are counted, and dropped where
    nothing of them can be trained. A stream is prepared row by row as it is read, and its report fills up meanwhile.

    Raises ValueError for rows it can't read (with their number), for targets the rows don't have, and when no row is
    left.
    """
    dataset = as_dataset(dataset, name)
    report = PreparationReport(name)
    if skips_preparation(args):
        return dataset, report
    if packing and args.max_length is None:
        raise ValueError("packing=True puts rows together up to max_length tokens, but max_length is None; set it")
    recipe = Recipe.of(args, packing)
    first_rows = list(islice(dataset, CHECKED_ROWS))
    found = _checked_format(first_rows, recipe, tokenizer, formatting_func, name)
    maker = RowMaker(tokenizer, recipe, found, name, formatting_func)
    if not found.conversational and found.kind != "tokens" and maker.eos is None:
        logger.warning(
            "%s: the tokenizer has no end-of-sequence token, so no row ends with one and the model won't learn to "
            'stop; set eos_token="..."', name,
        )  # fmt: skip
    if isinstance(dataset, IterableDataset):
        try_out(maker, first_rows)
        return _prepared_stream(dataset, maker, report, args, packing), report
    return _prepared_set(dataset, maker, report, args, packing), report


def skips_preparation(args: Any) -> bool:
    """Whether dataset_kwargs says {"skip_prepare_dataset": true}. Raises ValueError for any other key."""
    options = args.dataset_kwargs or {}
    unknown = sorted(set(options) - {"skip_prepare_dataset"})
    if unknown:
        raise ValueError(
            f"dataset_kwargs has {unknown}, of which nothing is known; its only key is skip_prepare_dataset"
        )
    return bool(options.get("skip_prepare_dataset"))


def as_dataset(rows: AnyRows, name: str = "train") -> Dataset | IterableDataset:
    """`rows` as a data set of the datasets library; torch data sets and lists of dicts are wrapped.

    Raises ValueError for a dictionary of splits and for data sets with a transform, whose rows are not what they hold.
    """
    if isinstance(rows, dict):
        raise ValueError(
            f"the {name} data set is a {type(rows).__name__} with the splits {sorted(rows)}; pass one of them"
        )
    if isinstance(rows, Dataset):
        if rows.format["type"] == "custom":
            raise ValueError(
                f"the {name} data set has a transform (with_transform), which preparation would not see; use map "
                f"instead"
            )
        return rows.with_format(None) if rows.format["type"] else rows
    if isinstance(rows, IterableDataset):
        return rows
    if isinstance(rows, torch.utils.data.IterableDataset):
        return IterableDataset.from_generator(_plain_rows, gen_kwargs={"rows": rows})
    if isinstance(rows, str):
        raise ValueError(
            f"the {name} data set is the name {rows!r}; load it first, e.g. with datasets.load_dataset (or give the "
            "name to `strop sft`)"
        )
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise ValueError(
            f"the {name} data set is a {type(rows).__name__}; expected a datasets or torch data set, or a list of rows"
        )
    return Dataset.from_dict(as_columns(list(_plain_rows(rows[i] for i in range(len(rows))))))  # of all rows' columns


def as_columns(rows: list[dict[str, Any]]) -> dict[str, list]:
    """`rows` as a batch; None where a row lacks a column."""
    columns = dict.fromkeys(column for row in rows for column in row)
    return {column: [row.get(column) for row in rows] for column in columns}


def _plain_rows(rows: Iterable[dict[str, Any]]):
    for row in rows:
        yield {
            key: value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value for key, value in row.items()
        }


def _checked_format(
    rows: list[dict[str, Any]],
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    formatting_func: FormattingFunc | None,
    name: str,
) -> Format:
    """The format of the first rows, after a look at them all. Raises ValueError for what can't be prepared."""
    if formatting_func is not None:
        if not rows:
            raise ValueError(f"the {name} data set has no rows")
        found = Format("tokens" if "input_ids" in rows[0] else "text", tuple(rows[0]))
        check_targets(recipe, found, formats=True)
        at_row(0, name, _refuse_batched, formatting_func, rows[0])
        return found
    found = detect(rows, recipe.text_field, name)
    check_targets(recipe, found, formats=False)
    if found.kind != "tokens":
        check = validate(
            rows, recipe.text_field, tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
        )
        if check.errors:
            raise ValueError(f"the {name} data set can't be prepared: " + "; ".join(check.errors[:3]))
    return found


def _refuse_batched(formatting_func: FormattingFunc, row: dict[str, Any]) -> None:
    """Raise ValueError for a function written for batches: on one row, it would go through the letters of its texts."""
    result = formatted(formatting_func, row)
    if len(result) < 2:
        return
    try:
        batched = formatting_func({column: [value] for column, value in row.items()})
    except Exception:
        return
    if isinstance(batched, list) and len(batched) == 1:
        raise ValueError(
            f"formatting_func is written for batches: it makes {len(result)} texts of one row, but 1 of a batch with "
            f"that row alone. It is "
            "called with one row; return its text"
        )


def check_ids(dataset: Dataset, vocabulary_size: int, name: str) -> None:
    """Raise ValueError for a prepared row with an id in input_ids or labels that the model doesn't know."""
    first = 0
    for table in dataset.with_format("arrow").iter(10_000):
        for column in ("input_ids", "labels"):
            lists = table.column(column).combine_chunks()
            ids = lists.flatten().to_numpy(zero_copy_only=False)
            unknown = ((ids < 0) | (ids >= vocabulary_size)) & ~((ids == IGNORE) & (column == "labels"))
            if unknown.any():
                at = int(unknown.argmax())
                raise ValueError(
                    f"prepared row {first + pc.list_parent_indices(lists)[at].as_py()} of the {name} data set has "
                    f"{ids[at]} in {column}, but the model's embedding has ids from 0 to {vocabulary_size - 1}: the "
                    "rows were tokenised for another model. Tokenise them with this one's tokenizer"
                )
        first += len(table)


# Map-style data sets


def _prepared_set(dataset: Dataset, maker: RowMaker, report: PreparationReport, args: Any, packing: bool) -> Dataset:
    was_prepared = dataset.info.description == PREPARED
    if counts_as_prepared(dataset, maker.recipe, report):
        kept = dataset.with_format(None)  # a copy, so that the description of the original stays as it is
    else:
        kept = map_rows(dataset, maker, report, args)
    if args.shuffle_dataset and not was_prepared:
        kept = kept.shuffle(seed=args.seed)
    if packing and "seq_lengths" not in kept.column_names:
        kept = _packed(kept, args)
        report.packed_rows = len(kept)
    kept.info.description = PREPARED
    logger.info("%s", report)
    return kept


def map_rows(dataset: Dataset, maker: Maker, report: PreparationReport, args: Any) -> Dataset:
    """The rows that `maker` makes, without those that are dropped; counted, and warned about."""
    with older_objects_frozen():
        counted = dataset.map(
            maker,
            batched=True,
            with_indices=True,
            remove_columns=dataset.column_names,
            num_proc=args.dataset_num_proc,
            features=_features(counts=True, packed="seq_lengths" in dataset.column_names),
            new_fingerprint=fingerprint(dataset, maker.tokenizer, *maker.key),
            desc=f"Preparing {report.name}",
        )
    fates = _count(counted, report, rows_in=len(dataset))
    _raise_if_nothing_left(report, maker.recipe)
    _warn(report)
    kept = counted.remove_columns(list(COUNTS))
    gone = fates & int(GONE) != 0
    return kept.select(np.flatnonzero(~gone)) if gone.any() else kept


@contextmanager
def older_objects_frozen() -> Iterator[None]:
    """Within it the garbage collector looks at new objects only.

    Else it goes through all of torch and transformers again and again while rows are made, for a tenth of the time.
    """
    if gc.get_freeze_count():  # somebody else's, who will thaw them
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def counts_as_prepared(dataset: Dataset, recipe: Recipe, report: PreparationReport) -> bool:
    """Whether nothing is left to do to any row; if so, they are counted."""
    columns = set(dataset.column_names)
    if not {"input_ids", "labels"} <= columns <= {"input_ids", "labels", "seq_lengths"}:
        return False
    longest = None if "seq_lengths" in columns else recipe.max_length
    counts = []
    for table in dataset.with_format("arrow").iter(10_000):
        lengths, trained = _lengths_and_trained(table)
        if lengths is None or trained is None or trained.min() < 1 or (longest is not None and lengths.max() > longest):
            return False
        counts.append((lengths, trained))
    report.rows_in = len(dataset)
    for lengths, trained in counts:
        nothing = np.zeros_like(lengths)
        report.count(nothing, lengths, nothing, nothing)
        report.tokens += int(lengths.sum())
        report.trained_tokens += int(trained.sum())
    return True


def _lengths_and_trained(table: pa.Table) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Each row's tokens and labels that train something; None where the two columns don't match or rows are empty."""
    ids, labels = (table.column(name).combine_chunks() for name in ("input_ids", "labels"))
    lengths = pc.fill_null(pc.list_value_length(ids), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    if lengths.min() < 1 or not pc.list_value_length(labels).equals(pc.list_value_length(ids)):
        return None, None
    labelled = labels.flatten().to_numpy(zero_copy_only=False) != IGNORE
    ends = np.cumsum(lengths)
    before = np.concatenate([[0], np.cumsum(labelled)])
    return lengths, before[ends] - before[ends - lengths] - labelled[ends - lengths]


def _features(counts: bool, packed: bool) -> Features:
    lists = ["input_ids", "labels", *(["seq_lengths"] if packed else [])]
    features = {name: List(Value("int32")) for name in lists}
    return Features(features | ({name: Value("int32") for name in COUNTS} if counts else {}))


def _packed(dataset: Dataset | IterableDataset, args: Any) -> Dataset | IterableDataset:
    """The packed data set; rows of "wrapped" packing, which know no documents, are one document each."""
    packed = pack_dataset(dataset, args.max_length, args.packing_strategy)
    if args.packing_strategy != "wrapped":
        return packed
    features = _features(counts=False, packed=True)
    return packed.map(_as_one_document, batched=True, features=features)


def _as_one_document(batch: dict[str, list]) -> dict[str, list]:
    return {"seq_lengths": [[len(ids)] for ids in batch["input_ids"]]}


def _count(counted: Dataset, report: PreparationReport, rows_in: int) -> np.ndarray:
    """Fill in the report; what became of each row comes back."""
    table = counted.data
    fates, lengths, lost, before, trained = (table.column(name).to_numpy() for name in COUNTS)
    report.rows_in += rows_in
    report.count(fates, lengths, lost, before)
    report.tokens += pc.sum(pc.list_value_length(table.column("input_ids"))).as_py() or 0
    report.trained_tokens += int(trained.sum())
    return fates


def _raise_if_nothing_left(report: PreparationReport, recipe: Recipe) -> None:
    if report.rows_out:
        return
    if report.dropped_rows:
        raise ValueError(
            f"no row of the {report.name} data set is left: {report.dropped_rows} of {report.rows_in} are longer than "
            f"max_length={recipe.max_length} (half of all have more than {report.percentile(50)} tokens) and "
            f'overlong="drop" drops them'
        )
    raise ValueError(
        f"no row of the {report.name} data set has a token to train within max_length={recipe.max_length}: the "
        f"longest prompt has "
        f'{report.longest_prompt} tokens. Raise max_length, shorten the prompts, or set truncation_mode="keep_end"'
    )


def _warn(report: PreparationReport, told: set[str] | None = None) -> None:
    """One line for each thing about a data set that its owner should know, unless it is among those `told`."""
    told = set() if told is None else told
    for count, message in WARNINGS.items():
        if getattr(report, count) and count not in told:
            logger.warning("%s: %s", report.name, message.format(report))
            told.add(count)


def fingerprint(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *settings: str) -> str:
    """What the prepared rows depend on, as the key of the cache; random where nothing would be cached."""
    if not dataset.cache_files or not datasets.is_caching_enabled():
        return generate_random_fingerprint()
    return Hasher.hash((dataset._fingerprint, strop.__version__, _tokenizer_key(tokenizer), *settings))


def _tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> tuple:
    """All of a tokenizer that shows in its output: vocabulary, merges, added tokens, special tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inner = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return type(tokenizer).__name__, inner, sorted(tokenizer.special_tokens_map.items()), repr(tokenizer.chat_template)


# Streams


def try_out(maker: Maker, rows: list[dict[str, Any]]) -> None:
    """Prepare the first rows of a stream, so that what is wrong with them is known before a model is loaded."""
    trial = PreparationReport(maker.name)
    made = maker(as_columns(rows), range(len(rows)))
    _count(Dataset(made), trial, rows_in=len(rows))
    if len(rows) < CHECKED_ROWS:
        _raise_if_nothing_left(trial, maker.recipe)


def _prepared_stream(
    dataset: IterableDataset, maker: RowMaker, report: PreparationReport, args: Any, packing: bool
) -> IterableDataset:
    columns = dataset.column_names or list(next(iter(dataset)))
    if args.shuffle_dataset:
        dataset = dataset.shuffle(seed=args.seed)
    stream = map_stream(dataset, maker, report)
    return _packed(stream, args) if packing and "seq_lengths" not in columns else stream


def map_stream(dataset: IterableDataset, maker: Maker, report: PreparationReport) -> IterableDataset:
    """The rows that `maker` makes as they are read, without those that are dropped; counted meanwhile."""
    columns = dataset.column_names or list(next(iter(dataset)))
    return dataset.map(
        StreamMaker(maker, report),
        batched=True,
        with_indices=True,
        remove_columns=columns,
        features=_features(counts=False, packed="seq_lengths" in columns),
    )


class StreamMaker:
    """A maker that counts as rows pass and leaves out those without tokens."""

    def __init__(self, maker: Maker, report: PreparationReport):
        self.maker = maker
        self.report = report
        self.told: set[str] = set()
        """What was warned about already."""

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        counted = Dataset(self.maker(batch, indices))
        fates = _count(counted, self.report, rows_in=len(indices))
        if self.report.rows_in >= HOPELESS_ROWS:
            _raise_if_nothing_left(self.report, self.maker.recipe)
        _warn(self.report, self.told)
        kept = counted.remove_columns(list(COUNTS))[np.flatnonzero(fates & int(GONE) == 0)]
        return kept
