"""Rows longer than max_length: cut, dropped, split or refused, and rows that have nothing to train."""

from strop.data.collate import IGNORE
from strop.data.report import Fate
from strop.data.tokenize import Prepared

OVERLONG = ("truncate", "drop", "split", "error")
TRUNCATION_MODES = ("keep_start", "keep_end")


def fit(row: Prepared, max_length: int | None, overlong: str, truncation_mode: str) -> list[Prepared]:
    """`row` as rows of at most `max_length` tokens; one that is dropped stays, empty, to be counted.

    Raises ValueError with the row's length under overlong="error".
    """
    size = len(row.input_ids)
    if max_length is None or size <= max_length:
        return [row]
    if overlong == "error":
        raise ValueError(
            f'has {size} tokens, more than max_length={max_length}, and overlong="error" asks to stop here. Raise '
            f"max_length, shorten the "
            'row, or set overlong to "truncate", "drop" or "split"'
        )
    if overlong == "drop":
        return [_emptied(row, Fate.DROPPED, lost=size)]
    if overlong == "split":
        starts = range(0, size, max_length)
        return [_piece(row, start, start + max_length, Fate.PIECE if start else Fate.SPLIT) for start in starts]
    start = 0 if truncation_mode == "keep_start" else size - max_length
    cut = _piece(row, start, start + max_length, Fate.TRUNCATED)
    cut.lost = row.lost + size - max_length
    return [cut]


def around_target(row: Prepared, max_length: int) -> Prepared:
    """`max_length` tokens of `row`: its end if all it trains is in there, else as much before what it trains as of
    it."""
    size = len(row.input_ids)
    first = next((i for i, label in enumerate(row.labels) if label != IGNORE), None)
    if size <= max_length or first is None:
        return row
    start = size - max_length if size - first < max_length else max(0, first - max_length // 2)
    return _piece(row, start, start + max_length, Fate.TRUNCATED)


def without_untrainable(row: Prepared) -> Prepared:
    """The row, emptied if no token but perhaps the first, which nothing predicts, has a label."""
    return row if trained_tokens(row) else _emptied(row, Fate.UNTRAINABLE, lost=row.lost)


def trained_tokens(row: Prepared) -> int:
    """Labels that train something: a label on the first token doesn't."""
    first = bool(row.labels) and row.labels[0] != IGNORE
    return len(row.labels) - row.labels.count(IGNORE) - first


def _piece(row: Prepared, start: int, end: int, fate: Fate) -> Prepared:
    return Prepared(row.input_ids[start:end], row.labels[start:end], row.fate | fate, row.length, row.lost)


def _emptied(row: Prepared, fate: Fate, lost: int) -> Prepared:
    return Prepared([], [], row.fate | fate, row.length, lost)
