"""Tokens of texts piece by piece, each piece tokenised once, where that is proven to change nothing.

A conversation's words repeat, so most of them need not be tokenised again. It is exact where the tokenizer itself cuts
a text before anything is merged: at its added tokens, and wherever its pre-tokenizer's expression can't match across.
`PIECE` cuts at such places only, for the expressions in `EXPRESSIONS`. None of them looks back, none looks further
ahead than white space goes on, and none has a match with, inside it,

- a space after anything that isn't white space;
- an ASCII letter or digit, and then the other of the two, ASCII punctuation or a newline;
- ASCII punctuation, and then a digit;
- a newline, and then anything but white space: one newline alone is the same match with and without what follows.

Anywhere else (other white space, letters beyond ASCII) a piece goes on to the next such place.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from strop.data.turns import Span

PIECE = re.compile(
    r"""
      [ ]?[A-Za-z]++(?![^\n -~])
    | [ ]?[0-9]++(?![^\n -~])
    | [ ]?[!-/:-@\[-`{-~]++(?: (?=[ 0-9]) | \n(?=\S) | [A-Za-z]++(?![^\n -~]) | \n?\Z)
    | \n(?=\S)
    | (?:\s*+\S++)+?(?=[ ]|\Z)
    | [\s\S]+
    """,
    re.VERBOSE,
)
EXPRESSIONS = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}", r"\p{N}{1,3}")
)
"""Of Llama 3, Qwen 2 and those after them; that of GPT-2 is part of ByteLevel and isn't spelt out."""
LONGEST, MOST = 32, 100_000
"""Characters of a piece worth keeping; pieces kept."""


class Pieces(dict[str, list[int]]):
    """The ids of each piece of text, made when first asked for."""

    def __init__(self, tokenizer: Tokenizer):
        added = (token.content for token in tokenizer.get_added_tokens_decoder().values())
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        self.tokenizer = tokenizer
        self.added = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def __missing__(self, piece: str) -> list[int]:
        ids = self.tokenizer.encode(piece, add_special_tokens=False).ids
        if len(piece) <= LONGEST and len(self) < MOST:
            self[piece] = ids
        return ids

    def __reduce__(self):
        return type(self), (self.tokenizer,)

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span]] | None:
        """The ids of `text`, and the spans of characters as spans of tokens; None if one starts or ends in a piece."""
        pieces: list[str] = []
        for i, part in enumerate(self.added.split(text)):
            pieces += [part] if i % 2 else PIECE.findall(part)
        starts = list(accumulate(map(len, pieces), initial=0))
        edges = list(chain.from_iterable(spans))
        places = [bisect_left(starts, edge) for edge in edges]
        if [starts[place] for place in places] != sorted(edges):
            return None
        ids = [self[piece] for piece in pieces]
        before = list(accumulate(map(len, ids), initial=0))
        cuts = [before[place] for place in places]
        return list(chain.from_iterable(ids)), list(zip(cuts[::2], cuts[1::2], strict=True))


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Pieces | None:
    """Pieces for `tokenizer`, which must stay as it is meanwhile; None where they aren't proven to be exact."""
    tokenizer("")  # it then reads special tokens as such, or as text, as it was told to
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.encode_special_tokens or getattr(backend.model, "dropout", None):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in added):
        return None
    if not isinstance(backend.normalizer, normalizers.NFC | None):
        return None
    return Pieces(backend) if _cuts_where_pieces_end(backend.pre_tokenizer) else None


def _cuts_where_pieces_end(pre_tokenizer: Any) -> bool:
    if not isinstance(pre_tokenizer, pre_tokenizers.ByteLevel | pre_tokenizers.Sequence):
        return False
    state = json.loads(pre_tokenizer.__getstate__())
    *before, last = state.get("pretokenizers", [state])
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if last["use_regex"]:
        return before in ([], [{"type": "Digits", "individual_digits": True}])
    return before in [
        [{"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}]
        for expression in EXPRESSIONS
    ]
