"""Rows to input_ids + labels: what is tokenised, what of it is trained, where a text ends.

Markers are placed by position, never recognised by value: content may hold any token. A conversation is exactly what
its chat template makes of it. Plain text gets the tokenizer's own special tokens (one BOS if it adds one) and one EOS
at its end. Prompt and completion are tokenised as one text, and the token at their seam belongs to the completion if
any of its characters does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from strop.data.collate import IGNORE
from strop.data.pieces import Pieces
from strop.data.report import Fate

Span = tuple[int, int]
NOTHING = Fate(0)


@dataclass(slots=True)
class Prepared:
    """A row of tokens on its way through preparation."""

    input_ids: list[int]
    labels: list[int]
    """The token where it is trained, -100 elsewhere."""
    fate: Fate = NOTHING
    length: int = 0
    """Tokens of the whole row, before anything is cut."""
    lost: int = 0
    """Tokens cut from it."""
    seq_lengths: list[int] | None = None
    """Lengths of the documents in a row that is packed already."""


def prepared(ids: list[int], spans: Sequence[Span], fate: Fate = NOTHING) -> Prepared:
    """A row of `ids` trained on the token spans only."""
    labels, at = [], 0
    for start, end in spans:
        labels += [IGNORE] * (start - at)
        labels += ids[start:end]
        at = end
    return Prepared(ids, labels + [IGNORE] * (len(ids) - at), fate, len(ids))


def eos_id(tokenizer: PreTrainedTokenizerBase, eos_token: str | None = None) -> int | None:
    """The id of `eos_token`, or of the tokenizer's own; None if there is neither. Raises ValueError if unknown."""
    if eos_token is None:
        return tokenizer.eos_token_id
    index = tokenizer.get_vocab().get(eos_token)
    if index is None:
        raise ValueError(
            f"eos_token={eos_token!r} is not in the vocabulary of {tokenizer.name_or_path}, so no row could end with it"
        )
    return index


def tokenise_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    starts: Sequence[int] | None = None,
    eos: int | None = None,
    pieces: Pieces | None = None,
) -> list[Prepared]:
    """Plain texts; with `starts`, only what stands from that character on is trained. `eos` ends every row that
    doesn't have it.

    A BOS or EOS written out at the ends of a text isn't added a second time by a tokenizer that adds them itself. With
    `pieces` of a tokenizer that adds a BOS at most, in a third of the time where `starts` are where pieces start.
    """
    starts = starts or [0] * len(texts)
    first, last = _own_markers(tokenizer)
    bare = [text.removeprefix(first).removesuffix(last) for text in texts]
    starts = [
        max(0, start - (len(text) - len(text.removeprefix(first)))) for start, text in zip(starts, texts, strict=True)
    ]
    rows: dict[int, Prepared] = {}
    opening = tokenizer("").input_ids
    if pieces is not None and opening in ([], [tokenizer.bos_token_id]):
        for i, (text, start) in enumerate(zip(bare, starts, strict=True)):
            found = pieces.encode(text, [(start, len(text))])
            if found is not None:
                ids, ((begin, _),) = found
                ids = _ended(opening + ids, text, eos, tokenizer)
                rows[i] = prepared(ids, [(begin + len(opening) if start else 0, len(ids))])
    whole = [i for i in range(len(bare)) if i not in rows]
    for i, (ids, encoding) in zip(whole, encoded(tokenizer, [bare[i] for i in whole], special=True), strict=True):
        text, start = bare[i], starts[i]
        begin, merged = (0, False) if start == 0 else _cut(tokenizer, ids, encoding, text, start, special=True)
        ids = _ended(ids, text, eos, tokenizer)
        rows[i] = prepared(ids, [(begin, len(ids))], Fate.MERGED if merged else NOTHING)
    return [rows[i] for i in range(len(bare))]


def _own_markers(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The BOS and the EOS that the tokenizer puts around a text by itself, as strings; "" for none."""
    around = tokenizer("").input_ids
    bos = tokenizer.bos_token if around[:1] == [tokenizer.bos_token_id] and tokenizer.bos_token else ""
    eos = tokenizer.eos_token if around[-1:] == [tokenizer.eos_token_id] and tokenizer.eos_token else ""
    return bos, eos if len(around) > 1 or not bos else ""


def _ended(ids: list[int], text: str, eos: int | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """`ids` with EOS at the end, unless they end with it, white space aside: rendered conversations have their own."""
    if eos is None or ids[-1:] == [eos]:
        return ids
    if text[-1:].isspace() and text.rstrip().endswith(tokenizer.convert_ids_to_tokens(eos)):
        return ids
    return [*ids, eos]


def tokenise_chats(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    fates: Sequence[Fate],
    pieces: Pieces | None = None,
) -> list[Prepared]:
    """Rendered conversations, trained on the given character spans. Nothing is added: the template wrote all marks.

    With `pieces` of the tokenizer, in a third of the time where spans start and end as pieces do.
    """
    rows: dict[int, Prepared] = {}
    if pieces is not None:
        tokenizer("")  # as in `encoded`
        for i, text in enumerate(texts):
            found = pieces.encode(text, spans[i])
            if found is not None:
                rows[i] = prepared(*found, fates[i])
    whole = [i for i in range(len(texts)) if i not in rows]
    for i, (ids, encoding) in zip(whole, encoded(tokenizer, [texts[i] for i in whole]), strict=True):
        text, fate, cuts = texts[i], fates[i], []
        for start, end in spans[i]:
            begin, merged = _cut(tokenizer, ids, encoding, text, start) if start else (0, False)
            stop = len(ids) if end >= len(text) else _end(tokenizer, ids, encoding, text, end)
            cuts.append((max(begin, cuts[-1][1]) if cuts else begin, stop))
            fate |= Fate.MERGED if merged else NOTHING
        rows[i] = prepared(ids, cuts, fate)
    return [rows[i] for i in range(len(texts))]


def encoded(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special: bool = False
) -> Iterator[tuple[list[int], Encoding | None]]:
    """The ids of each text, and its encoding where the tokenizer has any. `special`: with the tokens it adds itself.

    Texts handed over together are tokenised by threads of the tokenizer's own: on two processors in two thirds of the
    time of one thread, for a third more of theirs. So not where torch was told to do with one thread.
    """
    if not texts:
        return
    tokenizer("")  # whatever truncation and padding it was saved with are off from here on
    if tokenizer.is_fast and torch.get_num_threads() == 1:
        for text in texts:
            encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=special)
            yield encoding.ids, encoding
        return
    batch = tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False)
    yield from zip(batch["input_ids"], batch.encodings or repeat(None), strict=False)


def _cut(tokenizer, ids: list[int], encoding: Encoding | None, text: str, start: int, special: bool = False) -> Span:
    """The first token with a character from `start` on, and whether it has one before, too."""
    if encoding is None:
        return _cut_by_prefix(tokenizer, ids, text[:start], special)
    token = _covering(encoding, start, len(text))
    while token and encoding.token_to_chars(token - 1) and encoding.token_to_chars(token - 1)[1] > start:
        token -= 1  # white space whose offsets the tokenizer trims to nothing; only their end is where it was
    if token >= len(encoding):
        return token, False
    return token, encoding.token_to_chars(token)[0] < start


def _end(tokenizer, ids: list[int], encoding: Encoding | None, text: str, end: int) -> int:
    """The first token with no character before `end`."""
    if encoding is None:
        return _cut_by_prefix(tokenizer, ids, text[:end], False)[0]
    token = _covering(encoding, end, len(text))
    while token < len(encoding) and encoding.token_to_chars(token)[0] < end:
        token += 1
    while token and encoding.token_to_chars(token - 1)[0] >= end and encoding.token_to_chars(token - 1)[1] > end:
        token -= 1  # but not white space trimmed to nothing, which was before its end
    return token


def _covering(encoding: Encoding, char: int, length: int) -> int:
    """The first token at character `char`, or at the next one that any token has; their number if none has."""
    for position in range(char, length):
        token = encoding.char_to_token(position)
        if token is not None:
            return token
    return len(encoding)


def _cut_by_prefix(tokenizer, ids: list[int], head: str, special: bool) -> Span:
    """`_cut` for tokenizers without offsets: the tokens that `head` shares with the whole text are before the cut."""
    alone = tokenizer(head, add_special_tokens=special).input_ids
    shared = next((i for i, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), min(len(alone), len(ids)))
    return shared, shared < len(alone)
