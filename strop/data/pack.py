"""Packing: short documents share rows of at most `seq_length` tokens, so that no compute goes into padding.

A *document* is one row of the data set. A *piece* is a run of consecutive tokens of one document that stays together; a
packed row is a sequence of pieces. First a plan is made from lengths alone, then every column is cut by that plan.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, List, Value
from datasets.fingerprint import Hasher

from strop.compat import suggestion

AnyDataset = TypeVar("AnyDataset", Dataset, DatasetDict, IterableDataset, IterableDatasetDict)

SEQ_LENGTHS = "seq_lengths"
"""The column that packing adds: the lengths of a row's pieces, in order."""

STREAM_WINDOW = 1000
"""Documents of a stream that are held and packed together, unless `map_kwargs` has a "batch_size"."""

BLOCK_TOKENS = 1 << 22
"""Packed rows are built in record batches of about so many tokens: all that is held beside source and result."""

SPEED_ONLY = {
    "num_proc",
    "desc",
    "keep_in_memory",
    "load_from_cache_file",
    "cache_file_name",
    "writer_batch_size",
    "suffix_template",
}
"""Arguments of `Dataset.map` that never changed what comes out; accepted and unused, since nothing here is mapped."""


def pack_dataset(
    dataset: AnyDataset, seq_length: int, strategy: str = "bfd", map_kwargs: dict[str, Any] | None = None
) -> AnyDataset:
    """The data set (or dict of them, or stream) with its documents packed into rows of at most `seq_length` tokens.

    Every column must be a list with one entry a token; all are cut alike and keep their type and the set's format.

    - "bfd": documents are truncated to `seq_length`, then placed best-fit decreasing: the longest first, each into the
      open row with the least sufficient space, the row that reached that space first if there are several.
    - "bfd_split": the same, but a long document is cut into pieces of `seq_length` instead of losing its end.
    - "wrapped": all documents one after another, cut every `seq_length` tokens.

    The first two add the column "seq_lengths", without which a model would let the pieces of a row see each other.
    Empty documents vanish. The same input gives the same output.

    A data set is packed as a whole, a stream 1000 documents at a time; `map_kwargs={"batch_size": n}` packs every n
    documents on their own. Other arguments of `Dataset.map` that concern its speed are accepted and have nothing to do.

    Raises ValueError for a `seq_length` below 1, an unknown strategy or map argument, columns whose lengths differ, and
    sets that are packed already; TypeError for columns that aren't lists.
    """
    window = _check_arguments(seq_length, strategy, map_kwargs or {})
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        parts: dict[Any, Any] = dict(dataset)
        return type(dataset)({k: pack_dataset(part, seq_length, strategy, map_kwargs) for k, part in parts.items()})
    if isinstance(dataset, IterableDataset):
        return _pack_stream(dataset, seq_length, strategy, window or STREAM_WINDOW)
    return _pack_whole(dataset, seq_length, strategy, window)


def _check_arguments(seq_length: int, strategy: str, map_kwargs: dict[str, Any]) -> int | None:
    """How many documents to pack together; None for all."""
    if seq_length < 1:
        raise ValueError(f"seq_length={seq_length}: a packed row must hold at least one token. Pass a positive number.")
    if strategy not in STRATEGIES:
        raise ValueError(
            f"Unknown packing strategy {strategy!r}; known: {', '.join(STRATEGIES)}.{suggestion(strategy, STRATEGIES)}"
        )
    for name in map_kwargs:
        if name != "batch_size" and name not in SPEED_ONLY:
            raise ValueError(
                f"map_kwargs has {name!r}, which packing cannot honour: only 'batch_size' changes its result."
                f"{suggestion(name, ['batch_size', *SPEED_ONLY])}"
            )
    window = map_kwargs.get("batch_size")
    return window if window is not None and window > 0 else None  # as in Dataset.map, where both mean "all rows"


# Data sets


def _pack_whole(dataset: Dataset, seq_length: int, strategy: str, window: int | None) -> Dataset:
    # `dataset[:]` would honour a selection by slicing the table row by row, seconds for what is an index into a plan
    selected = dataset._indices
    rows = np.arange(len(dataset)) if selected is None else selected.column(0).to_numpy()
    features = _packed_features(dataset.features, strategy)
    documents = Documents(dataset.data.table)
    batches = [
        batch
        for start in range(0, len(rows), window or max(len(rows), 1))
        for batch in documents.pack(rows[start:][:window], seq_length, strategy)
    ]
    table = pa.Table.from_batches(batches, schema=features.arrow_schema)
    info = dataset.info.copy()
    info.features = features
    # given, because the constructor would otherwise hash all tokens
    fingerprint = Hasher.hash((dataset._fingerprint, __name__, seq_length, strategy, window))
    packed = Dataset(table, info=info, split=dataset.split, fingerprint=fingerprint)
    return _with_format_of(dataset, packed)


def _with_format_of(dataset: Dataset, packed: Dataset) -> Dataset:
    """`packed`, formatted like the set it was made of; columns that packing added are shown too."""
    form = dataset.format
    added = [name for name in packed.column_names if name not in dataset.column_names]
    shown = [*form["columns"], *added]
    if form["type"] is None and shown == packed.column_names:
        return packed
    return packed.with_format(form["type"], shown, form["output_all_columns"], **form["format_kwargs"])


def _pack_stream(dataset: IterableDataset, seq_length: int, strategy: str, window: int) -> IterableDataset:
    """A stream that holds at most `window` documents; its position can be saved and restored like any map's."""

    def pack(table: pa.Table) -> pa.Table:
        documents = Documents(table)
        batches = documents.pack(np.arange(len(table)), seq_length, strategy)
        return pa.Table.from_batches(batches, schema=_packed_schema(table.schema, strategy))

    features = dataset.features and _packed_features(dataset.features, strategy)
    formatting = dataset._formatting
    packed = dataset.with_format("arrow").map(pack, batched=True, batch_size=window, features=features)
    return packed.with_format(formatting.format_type if formatting else None)


def _packed_features(features: Features, strategy: str) -> Features:
    return features if strategy == "wrapped" else Features({**features, SEQ_LENGTHS: List(Value("int32"))})


def _packed_schema(schema: pa.Schema, strategy: str) -> pa.Schema:
    schema = schema.remove_metadata()
    return schema if strategy == "wrapped" else schema.append(pa.field(SEQ_LENGTHS, pa.list_(pa.int32())))


# Plans


@dataclass(frozen=True, slots=True)
class Plan:
    """Which pieces make which row. P pieces in the order they are laid out, R rows.

    Example: documents of 3, 6 and 1 tokens, cut and fitted into rows of 4

        documents  1 0 2 1
        starts     0 0 0 4
        lengths    4 3 1 2
        bounds     0 1 3 4        row 0 is piece 0, row 1 pieces 1 and 2, row 2 piece 3
    """

    documents: np.ndarray
    """(P,) the document each piece is from."""
    starts: np.ndarray
    """(P,) the piece's first token, counted within its document."""
    lengths: np.ndarray
    """(P,) tokens of each piece."""
    bounds: np.ndarray
    """(R + 1,) each row's first piece; the last entry is P."""

    def blocks(self, tokens: int) -> Iterator["Plan"]:
        """The plan in parts of whole rows, each of about so many tokens."""
        row_ends = np.cumsum(self.lengths)[self.bounds[1:] - 1]
        full = np.arange(tokens, row_ends[-1] if len(row_ends) else 0, tokens)
        cuts = np.unique([0, *np.searchsorted(row_ends, full), len(row_ends)])
        for first, last in pairwise(cuts):
            bounds = self.bounds[first : last + 1]
            pieces = slice(bounds[0], bounds[-1])
            yield Plan(self.documents[pieces], self.starts[pieces], self.lengths[pieces], bounds - bounds[0])


def plan_bfd(lengths: np.ndarray, seq_length: int) -> Plan:
    """Truncate, then fit best-first decreasing. `lengths` (documents,) in tokens, as in all plans."""
    documents = np.flatnonzero(lengths)
    return _best_fit(documents, np.zeros_like(documents), np.minimum(lengths[documents], seq_length), seq_length)


def plan_bfd_split(lengths: np.ndarray, seq_length: int) -> Plan:
    """Cut long documents into pieces of `seq_length`, then fit the pieces best-first decreasing."""
    num_pieces = -(-lengths // seq_length)
    documents = np.repeat(np.arange(len(lengths)), num_pieces)
    nth = np.arange(len(documents)) - np.repeat(_offsets(num_pieces)[:-1], num_pieces)
    starts = nth * seq_length
    return _best_fit(documents, starts, np.minimum(lengths[documents] - starts, seq_length), seq_length)


def plan_wrapped(lengths: np.ndarray, seq_length: int) -> Plan:
    """One long text, cut every `seq_length` tokens: a piece ends where a document or a row does."""
    documents = np.flatnonzero(lengths)
    text_starts = _offsets(lengths[documents])
    row_starts = np.arange(0, text_starts[-1], seq_length)
    cuts = np.sort(np.concatenate([text_starts, row_starts]), kind="stable")
    cuts = cuts[np.diff(cuts, prepend=-1) > 0]
    nth = np.searchsorted(text_starts, cuts[:-1], side="right") - 1
    bounds = np.append(np.searchsorted(cuts, row_starts), len(cuts) - 1)
    return Plan(documents[nth], cuts[:-1] - text_starts[nth], np.diff(cuts), bounds)


STRATEGIES = {"bfd": plan_bfd, "bfd_split": plan_bfd_split, "wrapped": plan_wrapped}


def _best_fit(documents: np.ndarray, starts: np.ndarray, lengths: np.ndarray, seq_length: int) -> Plan:
    key = (seq_length - lengths).astype(np.min_scalar_type(seq_length))  # small integers are sorted by counting
    order = np.argsort(key, kind="stable")
    rows = best_fit_decreasing(lengths[order], seq_length)
    order = order[np.argsort(rows, kind="stable")]
    return Plan(documents[order], starts[order], lengths[order], _offsets(np.bincount(rows)))


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item, (items,); bins are numbered as they are opened. `lengths` descend from at most `capacity`.

    Linear in the items: those of one length go as one group into the bins of one remaining space at a time. A bin that
    takes an item and still has room for another of that length is now the tightest, so it takes the next one too.
    """
    placed: list[int] = []
    open_bins, num_bins = _OpenBins(), 0
    for length, count in _runs(lengths):
        while count:
            space = open_bins.tightest(length)
            each = (space or capacity) // length
            wanted = -(-count // each)
            if space is None:
                space, bins = capacity, list(range(num_bins, num_bins + wanted))
                num_bins += wanted
            else:
                bins = open_bins.take(space, wanted)
            full, rest = divmod(min(count, each * len(bins)), each)
            placed += bins[:full] if each == 1 else [b for b in bins[:full] for _ in range(each)]
            placed += bins[full:] * rest
            open_bins.put(space - each * length, bins[:full])
            open_bins.put(space - rest * length, bins[full:])
            count -= full * each + rest
    return np.array(placed, dtype=np.int64)


def _runs(sorted_values: np.ndarray) -> Iterator[tuple[int, int]]:
    """(value, how often it stands there in a row), in order."""
    starts = np.flatnonzero(np.diff(sorted_values, prepend=-1))
    counts = np.diff(starts, append=len(sorted_values))
    return zip(sorted_values[starts].tolist(), counts.tolist(), strict=True)


class _OpenBins:
    """Bins by remaining space; those of equal space in the order in which they came to it."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[int]] = {}
        self._spaces: list[int] = []

    def tightest(self, length: int) -> int | None:
        """The smallest remaining space that holds `length`; None if no open bin does."""
        i = bisect_left(self._spaces, length)
        return self._spaces[i] if i < len(self._spaces) else None

    def put(self, space: int, bins: list[int]) -> None:
        if not space or not bins:
            return
        if space not in self._queues:
            self._queues[space] = deque()
            insort(self._spaces, space)
        self._queues[space].extend(bins)

    def take(self, space: int, at_most: int) -> list[int]:
        queue = self._queues[space]
        if at_most < len(queue):
            return [queue.popleft() for _ in range(at_most)]
        del self._queues[space], self._spaces[bisect_left(self._spaces, space)]
        return list(queue)


# Cutting columns


class Documents:
    """A table of token columns, read in place."""

    def __init__(self, table: pa.Table) -> None:
        _check_columns(table)
        batches = table.to_batches()
        self.schema = table.schema
        self.chunk_of_row = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        self.columns = {field.name: _Column([batch.column(field.name) for batch in batches]) for field in table.schema}

    def pack(self, rows: np.ndarray, seq_length: int, strategy: str) -> Iterator[pa.RecordBatch]:
        """The packed rows of the documents at `rows` of the table, in batches of about four million tokens."""
        lengths = self._lengths(rows)
        schema = _packed_schema(self.schema, strategy)
        for block in STRATEGIES[strategy](lengths, seq_length).blocks(BLOCK_TOKENS):
            yield self._assemble(block, rows[block.documents], schema)

    def _lengths(self, rows: np.ndarray) -> np.ndarray:
        """(len(rows),) tokens of each document, once the columns agree on them."""
        (first, reference), *others = self.columns.items()
        lengths = reference.lengths[rows]
        for name, column in others:
            differ = np.flatnonzero(column.lengths[rows] != lengths)
            if len(differ):
                row = differ[0]
                raise ValueError(
                    f"Row {row} has {lengths[row]} values in {first!r} but {column.lengths[rows[row]]} in {name!r}: "
                    f"packing cuts every column at the same tokens, so each needs one value a token. Remove the column "
                    f"or mend the row."
                )
        return lengths

    def _assemble(self, block: Plan, rows: np.ndarray, schema: pa.Schema) -> pa.RecordBatch:
        offsets = _offsets(block.lengths)[block.bounds]
        chunks = self.chunk_of_row[rows]
        arrays = []
        for field in schema:
            if field.name == SEQ_LENGTHS:
                arrays.append(_list_array(field.type, block.bounds, pa.array(block.lengths, pa.int32())))
                continue
            column = self.columns[field.name]
            starts = column.starts[rows] + block.starts
            arrays.append(_list_array(field.type, offsets, column.gather(chunks, starts, block.lengths)))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _check_columns(table: pa.Table) -> None:
    if not table.column_names:
        raise ValueError("The data set has no columns: there is nothing to pack.")
    if SEQ_LENGTHS in table.column_names:
        raise ValueError(
            f"The data set has a column {SEQ_LENGTHS!r}: it is packed already, and packing rows that hold several "
            f"documents would cut through them. Pack the documents themselves."
        )
    for field in table.schema:
        if not (pa.types.is_list(field.type) or pa.types.is_large_list(field.type)):
            raise TypeError(
                f"Column {field.name!r} has type {field.type}, not a list with one value a token: it can't be cut "
                f"where the tokens are. Select the token columns: dataset.select_columns(['input_ids', 'labels'])."
            )


class _Column:
    """One column: the flat values of each of its chunks, and where in its chunk each document starts."""

    def __init__(self, chunks: list[Any]) -> None:
        lengths = [chunk.value_lengths().fill_null(0).to_numpy().astype(np.int64) for chunk in chunks]
        self.lengths = np.concatenate([np.empty(0, np.int64), *lengths])
        self.starts = np.concatenate([np.empty(0, np.int64), *(_offsets(chunk)[:-1] for chunk in lengths)])
        self.values = [chunk.flatten() for chunk in chunks]

    def gather(self, chunks: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> pa.Array:
        """The values of some pieces, one after another. Copying slices takes half the time of taking token by token."""
        if len(self.values) == 1:
            return pa.LargeListViewArray.from_arrays(pa.array(starts), pa.array(lengths), self.values[0]).flatten()
        ends = starts + lengths
        follows = (chunks[1:] == chunks[:-1]) & (starts[1:] == ends[:-1])
        firsts, lasts = np.append(True, ~follows), np.append(~follows, True)
        where = zip(chunks[firsts].tolist(), starts[firsts].tolist(), ends[lasts].tolist(), strict=True)
        values = self._numbers or self.values
        return _concatenate([values[chunk][start:end] for chunk, start, end in where])

    @cached_property
    def _numbers(self) -> list[np.ndarray] | None:
        """The values as NumPy reads them in place, which is faster; None where they are no numbers or have nulls."""
        if not all(_is_number(chunk.type) and not chunk.null_count for chunk in self.values):
            return None
        return [chunk.to_numpy() for chunk in self.values]


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _concatenate(parts: list[np.ndarray] | list[pa.Array]) -> pa.Array:
    if isinstance(parts[0], np.ndarray):
        return pa.array(np.concatenate(parts) if len(parts) > 1 else parts[0])
    return pa.concat_arrays(parts)


def _list_array(kind: pa.DataType, offsets: np.ndarray, values: pa.Array) -> pa.Array:
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values, type=kind)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)
