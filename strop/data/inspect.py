"""Prepared rows as the trainer sees them: every token readable and marked trained, context or padding.

`explain` reads the rows through the collator's own mask, so what it marks is what the loss counts. Four renderers show
the result: plain text, colour, JSON, and a page of HTML.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from strop.data.collate import IGNORE, SupervisedCollator
from strop.data.formats import CHECKED_ROWS, detect
from strop.data.recipe import Recipe, RowMaker
from strop.data.report import GONE, Fate
from strop.data.turns import stop_token_ids

Mark = Literal["trained", "context", "pad"]
Stop = Literal["trained", "not trained", "absent", "nothing trained"]


@dataclass(frozen=True, slots=True)
class ExplainedRow:
    """One row of a prepared data set. The per-token lists are aligned.

    Example: a row of two packed segments

        tokens     Q:  A <eos> Q  :  B <eos>
        trained    0   1   1   0  0  1   1
        segments   3           4
        stops      trained     trained
    """

    index: int
    """Position in the data set; of the raw row where `raw` is given."""
    tokens: list[str]
    """Text of each token; bytes that are no whole character as \\xNN."""
    input_ids: list[int]
    trained: list[int]
    """1 exactly where the loss counts: the collator's completion mask."""
    num_padding: int
    """Padding at the end that the row already has."""
    segments: list[int]
    """Tokens of each row that shares this one; a single entry without packing."""
    stops: list[Stop]
    """For each segment, whether the token that ends generation is trained."""
    warnings: list[str]
    raw: Mapping[str, Any] | None = None
    """The row before preparation."""
    num_cut: int = 0
    """Tokens lost to max_length."""
    side: str = ""
    """Which of the row's answers it is, where there are several."""

    @property
    def marks(self) -> list[Mark]:
        """What each token is to the loss."""
        content = len(self.trained) - self.num_padding
        return ["trained" if t else "context" if i < content else "pad" for i, t in enumerate(self.trained)]

    @property
    def num_trained(self) -> int:
        return sum(self.trained)

    @property
    def share(self) -> float:
        """Trained tokens among all."""
        return self.num_trained / max(len(self.trained), 1)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each segment begins and ends in the row."""
        return list(pairwise(accumulate(self.segments, initial=0)))


def explain(
    dataset: Any, tokenizer: PreTrainedTokenizerBase, indices: Iterable[int], stop_ids: Iterable[int] | None = None
) -> list[ExplainedRow]:
    """The rows at `indices` of a prepared `dataset` (columns input_ids, labels, and seq_lengths if packed).

    `stop_ids` end generation, those of `stop_token_ids` if not given. Raises ValueError for an index beyond
    the data set.
    """
    known = set(stop_token_ids(tokenizer) if stop_ids is None else stop_ids)
    return [explain_row(index, dataset[index], tokenizer, known) for index in checked(indices, len(dataset))]


def explain_raw(
    dataset: Any, tokenizer: PreTrainedTokenizerBase, args: Any, indices: Iterable[int]
) -> list[ExplainedRow]:
    """What becomes of the rows at `indices` of an unprepared `dataset`: none, one or several each.

    `args` has the fields of DataArguments and TargetArguments. A row that preparation drops comes without tokens and
    says why. Raises ValueError for an index beyond the data set and for rows that can't be prepared.
    """
    recipe = Recipe.of(args, packing=False)
    first = [dataset[i] for i in range(min(CHECKED_ROWS, len(dataset)))]
    maker = RowMaker(tokenizer, recipe, detect(first, recipe.text_field, "train"))
    stop_ids = set(stop_token_ids(tokenizer))
    rows = []
    for index in checked(indices, len(dataset)):
        raw = dataset[index]
        for piece in maker({name: [value] for name, value in raw.items()}, [index]).to_pylist():
            fate, prepared = Fate(piece["fate"]), {"labels": piece["labels"], "input_ids": piece["input_ids"]}
            row = dropped(index) if fate & GONE else explain_row(index, prepared, tokenizer, stop_ids)
            notes = [text for flag, text in NOTES.items() if fate & flag]
            rows.append(replace(row, raw=raw, num_cut=piece["lost"], warnings=[*notes, *row.warnings]))
    return rows


NOTES = {
    Fate.DROPPED: 'dropped: longer than max_length, and overlong="drop"',
    Fate.UNTRAINABLE: "dropped: no token to train is left of it within max_length",
    Fate.MERGED: "one token holds the end of the prompt and the start of the completion; it is trained",
    Fate.REWRITTEN: "the chat template renders earlier turns otherwise than the model will have said them",
}
"""What is worth saying about the fate of a row."""


def dropped(index: int) -> ExplainedRow:
    """A row of which nothing is trained."""
    return ExplainedRow(index, [], [], [], num_padding=0, segments=[], stops=[], warnings=[])


def checked(indices: Iterable[int], size: int) -> Iterator[int]:
    """`indices`. Raises ValueError for one beyond a data set of `size` rows."""
    for index in indices:
        if not 0 <= index < size:
            raise ValueError(f"there is no row {index}: the data set has {size} rows, 0 to {size - 1}")
        yield index


def explain_row(
    index: int, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, stop_ids: set[int]
) -> ExplainedRow:
    """One prepared row, explained."""
    ids, segments = list(row["input_ids"]), list(row.get("seq_lengths") or [len(row["input_ids"])])
    trained = trained_tokens(row, segments)
    parts = [(ids[start:end], trained[start:end]) for start, end in pairwise(accumulate(segments, initial=0))]
    tokens, num_padding = token_texts(tokenizer, ids), count_padding(ids, trained, tokenizer)
    pieces = [tokens[start:end] for start, end in pairwise(accumulate(segments, initial=0))]
    return ExplainedRow(
        index=index,
        tokens=tokens,
        input_ids=ids,
        trained=trained,
        num_padding=num_padding,
        segments=segments,
        stops=[stop_state(*part, piece, stop_ids) for part, piece in zip(parts, pieces, strict=True)],
        warnings=list(warnings_about(parts, num_padding, tokenizer, stop_ids)),
    )


def trained_tokens(row: Mapping[str, Any], segments: list[int]) -> list[int]:
    """1 where the loss counts: where the trainer's collator finds a label and, in the same segment, a token before."""
    mask = SupervisedCollator(pad_token_id=0, layout="padded")([dict(row)])["completion_mask"].tolist()
    return [on for line, length in zip(mask, segments, strict=True) for on in line[:length]]


def count_padding(input_ids: list[int], trained: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Padding at the end of a row that came padded.

    Where padding has the stop token's id, one untrained stop token before the padding is none itself.
    """
    content = len(input_ids)
    while content and input_ids[content - 1] == tokenizer.pad_token_id and not trained[content - 1]:
        content -= 1
    ended_before = content > 0 and input_ids[content - 1] == tokenizer.eos_token_id
    if tokenizer.pad_token_id == tokenizer.eos_token_id and not ended_before:
        content = min(content + 1, len(input_ids))
    return len(input_ids) - content


def stop_state(input_ids: list[int], trained: list[int], tokens: list[str], stop_ids: set[int]) -> Stop:
    """Whether a model trained on this segment learns to stop: a template may put white space after the stop token."""
    if 1 not in trained:
        return "nothing trained"
    last = len(trained) - 1 - trained[::-1].index(1)
    after = input_ids[last + 1 :]
    while last > 0 and input_ids[last] not in stop_ids and not tokens[last].strip():
        last -= 1
    if trained[last] and input_ids[last] in stop_ids:
        return "trained"
    return "not trained" if stop_ids.intersection(after) else "absent"


def warnings_about(
    parts: Sequence[tuple[list[int], list[int]]],
    num_padding: int,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: set[int],
) -> Iterator[str]:
    """What is suspicious about a row, `parts` being (input_ids, trained) of its segments."""
    bos: Any = tokenizer.bos_token_id
    for number, (ids, trained) in enumerate(parts):
        where = f" in segment {number}" if len(parts) > 1 else ""
        if 1 not in trained:
            yield f"no trained token{where}: it costs time and teaches nothing"
        if bos is not None and bos not in stop_ids and ids[:2] == [bos, bos]:
            yield f"begins with {tokenizer.bos_token!r} twice{where}: the text has it and the tokenizer added another"
        kept = [token for token, t in zip(ids, trained, strict=True) if t]
        if len(kept) > 1 and kept[-1] == kept[-2] and kept[-1] in stop_ids:
            yield f"the stop token {tokenizer.convert_ids_to_tokens(kept[-1])!r} is trained twice at the end{where}"
    unk: Any = tokenizer.unk_token_id
    unknown = sum(ids.count(unk) for ids, _ in parts)
    if unk is not None and unk not in stop_ids and unknown:
        yield f"{unknown} tokens are {tokenizer.unk_token!r}: text that the tokenizer can't spell"
    if num_padding:
        yield f"ends in {num_padding} padding tokens: the trainer pads by itself, so they cost time only"


# Tokens as text


def token_texts(tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int]) -> list[str]:
    """The text of each token, spaces and newlines as they are; bytes that are no whole character as \\xNN."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_bytes = backend is not None and backend.decoder is not None and "ByteLevel" in repr(backend.decoder)
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    texts: dict[int, str] = {}
    for index in set(input_ids):
        (piece,) = tokenizer.convert_ids_to_tokens([index])
        if index in added or piece is None:
            texts[index] = added.get(index, f"<no token {index}>")
        else:
            texts[index] = from_byte_alphabet(piece) if is_bytes else piece.replace("▁", " ")
    return [texts[index] for index in input_ids]


def from_byte_alphabet(piece: str) -> str:
    """The text that a byte-level token stands for; bytes that are no UTF-8 as \\xNN."""
    if not all(character in BYTES for character in piece):
        return piece
    return bytes(BYTES[character] for character in piece).decode("utf-8", errors="backslashreplace")


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of byte-level vocabularies stands for.

    Bytes that print in Latin-1 stand for themselves, the others for the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = byte_alphabet()


# Renderers


def as_json(rows: Sequence[ExplainedRow], report: Any = None) -> str:
    """{"rows": [...], "report": ...}; in each row `tokens`, `input_ids`, `trained` and `labels` are aligned."""
    fields = (
        "index",
        "side",
        "raw",
        "tokens",
        "input_ids",
        "trained",
        "segments",
        "stops",
        "num_padding",
        "num_cut",
        "warnings",
    )
    facts = [
        {name: getattr(row, name) for name in fields}
        | {"labels": [t if on else IGNORE for t, on in zip(row.input_ids, row.trained, strict=True)]}
        | {"num_tokens": len(row.tokens), "num_trained": row.num_trained}
        for row in rows
    ]
    return json.dumps({"rows": facts, "report": report}, ensure_ascii=False, default=str)


def headline(row: ExplainedRow) -> str:
    """Counts of a row in one line."""
    parts = [
        f"row {row.index} {row.side}".rstrip(),
        f"{len(row.tokens)} tokens",
        f"{row.num_trained} trained ({row.share:.1%})",
    ]
    if len(row.segments) > 1:
        parts.append(f"{len(row.segments)} segments of {', '.join(map(str, row.segments))}")
    if row.num_cut:
        parts.append(f"TRUNCATED: {row.num_cut} tokens lost")
    stops = sorted(set(row.stops))
    if stops and stops != ["nothing trained"]:
        parts.append(f"stop token {' / '.join(stops)}")
    return "   ".join(parts)


def runs(row: ExplainedRow, span: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """The tokens of a span, neighbours with the same mark joined."""
    pairs = list(zip(row.marks, row.tokens, strict=True))[slice(*span)]
    for mark, group in groupby(pairs, key=lambda pair: pair[0]):
        yield mark, "".join(token for _, token in group)


def visible(text: str) -> str:
    """`text` with spaces and control characters that can be seen; a newline also breaks the line."""
    shown = text.replace(" ", "·").replace("\t", "→").replace("\n", "↵\n")
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in shown)


def as_text(rows: Sequence[ExplainedRow], show_tokens: bool = False) -> str:
    """Plain text: runs of equally marked tokens, or one line a token."""
    return "\n".join(_row_as_text(row, show_tokens) for row in rows)


def _row_as_text(row: ExplainedRow, show_tokens: bool) -> str:
    lines = [headline(row), *(f"  ! {warning}" for warning in row.warnings)]
    if row.raw is not None:
        lines += [f"  raw      {line}" for line in raw_lines(row.raw)]
    for number, span in enumerate(row.spans):
        if len(row.segments) > 1:
            lines.append(f"  -- segment {number}: {row.segments[number]} tokens, stop token {row.stops[number]}")
        lines += _token_lines(row, span) if show_tokens else _run_lines(row, span)
    return "\n".join(lines) + "\n"


def _token_lines(row: ExplainedRow, span: tuple[int, int]) -> list[str]:
    marks = row.marks
    return [
        f"  {marks[i]:8} {i:6} {row.input_ids[i]:7}  {visible(row.tokens[i]).rstrip(chr(10))}" for i in range(*span)
    ]


def _run_lines(row: ExplainedRow, span: tuple[int, int]) -> list[str]:
    lines = []
    for mark, text in runs(row, span):
        first, *rest = visible(text).removesuffix("\n").split("\n")
        lines += [f"  {mark:8} {first}", *(" " * 11 + line for line in rest)]
    return lines


def raw_lines(raw: Mapping[str, Any]) -> list[str]:
    """One line a column, as JSON."""
    return [f"{name}: {json.dumps(value, ensure_ascii=False, default=str)}" for name, value in raw.items()]


STYLES: dict[Mark, str] = {"trained": "bold green", "context": "grey62", "pad": "red"}


def as_rich(rows: Sequence[ExplainedRow]) -> Any:
    """For a terminal with colours: trained tokens stand out; every other token is underlined to part neighbours."""
    from rich.text import Text

    page = Text()
    for row in rows:
        page.append(headline(row) + "\n", "bold")
        for warning in row.warnings:
            page.append(f"! {warning}\n", "yellow")
        for line in raw_lines(row.raw or {}):
            page.append(line + "\n", "blue")
        marks = row.marks
        for number, (start, end) in enumerate(row.spans):
            if len(row.segments) > 1:
                page.append(f"-- segment {number}, stop token {row.stops[number]}\n", "magenta")
            for i in range(start, end):
                page.append(visible(row.tokens[i]), STYLES[marks[i]] + (" underline" if i % 2 else ""))
            page.append("\n")
        page.append("\n")
    return page


PAGE_STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1a202c; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f7fafc; padding: .75rem; border-radius: 4px; }
.trained { background: #c6f6d5; } .context { color: #4a5568; } .pad { background: #fed7d7; }
span[title] { border-right: 1px solid #cbd5e0; } .warning { color: #c05621; } .cut { border-top: 2px dashed #805ad5; }
h2 { font-size: 1rem; margin: 2rem 0 .25rem; }
"""


def as_html(rows: Sequence[ExplainedRow], report: Any = None, title: str = "rows as the trainer sees them") -> str:
    """A self-contained page; pointing at a token shows its index and id."""
    body = "\n".join(_row_as_html(row) for row in rows)
    shown = json.dumps(report, indent=2, ensure_ascii=False, default=str)
    footer = f"<h2>preparation</h2><pre>{escape(shown)}</pre>" if report is not None else ""
    legend = " ".join(f'<span class="{mark}">{mark}</span>' for mark in STYLES)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{PAGE_STYLE}</style>\n<h1>{escape(title)}</h1>\n<p>{legend}</p>\n{body}\n{footer}\n</html>\n"
    )


def _row_as_html(row: ExplainedRow) -> str:
    parts = [f"<h2>{escape(headline(row))}</h2>"]
    parts += [f'<p class="warning">{escape(warning)}</p>' for warning in row.warnings]
    if row.raw is not None:
        parts.append(
            f"<details><summary>raw row</summary><pre>{escape(chr(10).join(raw_lines(row.raw)))}</pre></details>"
        )
    marks = row.marks
    for number, (start, end) in enumerate(row.spans):
        tokens = "".join(
            f'<span class="{marks[i]}" title="{i}: id {row.input_ids[i]}">{escape(visible(row.tokens[i]))}</span>'
            for i in range(start, end)
        )
        parts.append(f'<pre class="{"cut" if number else "first"}">{tokens}</pre>')
    return "\n".join(parts)
