"""How one row becomes a prompt and answers in tokens: a recipe made of settings, and the callable that follows it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from strop.data.chat import ChatTemplate, Conversation, common_prefix
from strop.data.collate import IGNORE
from strop.data.formats import ROLES, Message, Row, at_row
from strop.data.overlong import TRUNCATION_MODES
from strop.data.pieces import Pieces, pieces_of
from strop.data.prompts import Answers, answers_of, common_length
from strop.data.recipe import TOKEN_LIST
from strop.data.report import Fate
from strop.data.sides import PAIRS, PreferenceFormat
from strop.data.tokenize import NOTHING, Prepared, eos_id, tokenise_chats, tokenise_texts
from strop.data.turns import completion_start, stop_token_ids

logger = logging.getLogger(__name__)

OVERLONG = ("truncate", "drop", "error")
COUNTS = ("fate", "length", "before", "tokens", "trained", "lost", "cut", "ends")
"""Numbers that stand beside each row until the report has counted them."""


@dataclass(frozen=True)
class PreferenceRecipe:
    """The settings that decide what a row becomes. Two equal recipes prepare equal rows equally."""

    max_length: int | None = 1024
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: str = "keep_start"
    overlong: str = "truncate"
    eos_token: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        for name, value, known in (
            ("overlong", self.overlong, OVERLONG),
            ("truncation_mode", self.truncation_mode, TRUNCATION_MODES),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is none of {', '.join(known)}")
        for name in ("max_length", "max_prompt_length", "max_completion_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} leaves no token of any row; use None for no limit")

    @classmethod
    def of(cls, args: Any, **more: Any) -> Self:
        """The recipe in the fields of PreferenceArguments, and `more` of a subclass."""
        return cls(
            max_length=args.max_length,
            max_prompt_length=args.max_prompt_length,
            max_completion_length=args.max_completion_length,
            truncation_mode=args.truncation_mode,
            overlong=args.overlong,
            eos_token=args.eos_token,
            template_options=dict(args.chat_template_kwargs or {}),
            **more,
        )

    def capped(self, prompt: int, longest: int) -> tuple[int, int]:
        """The two lengths within their own limits."""
        limits = zip((prompt, longest), (self.max_prompt_length, self.max_completion_length), strict=True)
        prompt, longest = (length if limit is None else min(length, limit) for length, limit in limits)
        return prompt, longest

    def holds(self, prompt: int | np.ndarray, longest: int | np.ndarray) -> bool:
        """Whether rows with prompts and longest answers of these lengths are within all limits."""
        limits = (self.max_prompt_length, self.max_completion_length, self.max_length)
        lengths = (prompt, longest, prompt + longest)
        return all(limit is None or np.max(length) <= limit for length, limit in zip(lengths, limits, strict=True))

    def rooms(self, prompt: int, longest: int) -> tuple[int, int]:
        """Tokens to keep of a prompt of `prompt` tokens, and of each of its answers, the longest having `longest`.

        Of the prompt its end is kept, of answers their start. Above max_length the answers give way, or with "keep_end"
        the prompt, but for its last token.
        """
        prompt, longest = self.capped(prompt, longest)
        if self.max_length is None or prompt + longest <= self.max_length:
            return prompt, longest
        if self.truncation_mode == "keep_end":
            prompt = max(min(prompt, 1), self.max_length - longest)
        return prompt, max(0, self.max_length - prompt)


@dataclass(slots=True)
class Tokens:
    """A prompt and the answers to it in tokens, on their way through preparation."""

    prompt: list[int]
    sides: list[list[int]]
    extras: dict[str, Any]
    fate: Fate = NOTHING
    length: int = 0
    """Tokens of the prompt with its longest answer, before anything is cut."""
    before: int = 0
    """Tokens of the prompt, before anything is cut."""
    lost: int = 0
    cut: int = 0
    """Answers that lost tokens."""
    ends: int = 0
    """Answers that lost the token that ends them."""
    ref_logps: dict[str, Any] = field(default_factory=dict)
    """What a reference said of them before, by column."""

    @property
    def counts(self) -> tuple[int, ...]:
        """`COUNTS` of the row. The first token of a row without a prompt is not predicted, so not trained."""
        trained = sum(max(0, len(ids) - (not self.prompt)) for ids in self.sides)
        tokens = len(self.prompt) + sum(map(len, self.sides))
        return int(self.fate), self.length, self.before, tokens, trained, self.lost, self.cut, self.ends

    def emptied(self, fate: Fate) -> "Tokens":
        """Nothing of it, to be counted."""
        lost = self.lost + len(self.prompt) + sum(map(len, self.sides))
        fate |= self.fate & ~(Fate.TRUNCATED | Fate.PROMPT_CUT)
        return replace(self, prompt=[], sides=[[] for _ in self.sides], fate=fate, lost=lost, cut=0, ends=0)


@dataclass
class PreferenceMaker:
    """Follows a recipe: batches of rows, as columns, to a table of the columns of `wanted` and `COUNTS`.

    A row that is dropped stays in the table, without tokens, to be counted. Raises ValueError naming the row that can't
    be prepared.
    """

    tokenizer: PreTrainedTokenizerBase
    recipe: PreferenceRecipe
    wanted: PreferenceFormat
    name: str = "train"
    extras: tuple[str, ...] = ()
    """Those of the wanted extras that the rows have."""
    ref_logps: tuple[str, ...] = ()
    """Columns of a reference's log-probabilities that the rows have, which stay as they are."""

    def __call__(self, batch: Mapping[str, Sequence], indices: Sequence[int]) -> pa.Table:
        columns = list(batch)
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*(batch[c] for c in columns), strict=True)]
        made: list[Tokens] = []
        for index, parts in zip(indices, self._tokenised(rows, indices), strict=True):
            made += [at_row(index, self.name, self._fitted, part) for part in parts]
        return self._table(made)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.recipe.template_options)

    @cached_property
    def pieces(self) -> Pieces | None:
        return pieces_of(self.tokenizer)

    @cached_property
    def roles(self) -> frozenset[str]:
        return self.template.roles if self.tokenizer.chat_template else frozenset(ROLES)

    @cached_property
    def eos(self) -> int | None:
        return eos_id(self.tokenizer, self.recipe.eos_token)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """What ends an answer."""
        return frozenset(stop_token_ids(self.tokenizer)) | ({self.eos} - {None})

    @cached_property
    def _opening(self) -> list[int]:
        """The ids that the tokenizer puts before any text."""
        ids = self.tokenizer("").input_ids
        return ids[:1] if ids[:1] == [self.tokenizer.bos_token_id] else []

    @property
    def _closes_texts(self) -> bool:
        """Whether the tokenizer ends texts by itself, as those of encoders do."""
        return self.tokenizer("").input_ids[-1:] == [self.tokenizer.sep_token_id]

    def check_settings(self, row: Row) -> None:
        """Raise ValueError for settings without effect on rows like `row`, and warn where no answer would end."""
        written = "tokens"
        if not token_columns(row, self.wanted):
            written = "messages" if answers_of(row, self.wanted, self.roles).conversational else "plain text"
        if written == "plain text" and self.eos is None and not self._closes_texts:
            logger.warning(
                "%s: the tokenizer has no end-of-sequence token, so no completion ends with one; set "
                'eos_token="..."', self.name,
            )  # fmt: skip
        check_effect(self.recipe, written)

    @property
    def key(self) -> tuple[str, ...]:
        """What the rows it makes depend on, beside its tokenizer."""
        return repr(self.recipe), repr(self.wanted), repr(self.extras), repr(self.ref_logps)

    # Reading

    def _tokenised(self, rows: Sequence[Row], indices: Sequence[int]) -> list[list[Tokens]]:
        """For each of `rows` what is made of it: two labelled rows of a pair, else one."""
        read = [at_row(i, self.name, self._read, row) for i, row in zip(indices, rows, strict=True)]
        waiting = [(i, answers) for i, answers in zip(indices, read, strict=True) if isinstance(answers, Answers)]
        chats = [(i, answers) for i, answers in waiting if answers.conversational]
        texts = [(i, answers) for i, answers in waiting if not answers.conversational]
        made = {id(answers): tokens for answers, tokens in zip((a for _, a in texts), self._texts(texts), strict=True)}
        made |= {id(answers): tokens for answers, tokens in zip((a for _, a in chats), self._chats(chats), strict=True)}
        whole = [made[id(answers)] if isinstance(answers, Answers) else answers for answers in read]
        return [at_row(i, self.name, self._parts, t, row) for i, t, row in zip(indices, whole, rows, strict=True)]

    def _read(self, row: Row) -> Answers | Tokens:
        columns = token_columns(row, self.wanted)
        if columns:
            return tokens_of(row, columns, self.wanted, self.ref_logps)
        return answers_of(row, self.wanted, self.roles)

    def _parts(self, tokens: Tokens, row: Row) -> list[Tokens]:
        """`tokens` with the row's extras; a pair, where labelled rows are wanted, as two of them."""
        if "label" in self.wanted.extras and len(tokens.sides) == 2:
            rest = {name: as_number(name, row.get(name)) for name in self.extras if name != "label"}
            return [
                Tokens(tokens.prompt, [ids], {**rest, "label": label}, tokens.fate)
                for ids, label in zip(tokens.sides, (True, False), strict=True)
            ]
        tokens.extras = {name: as_number(name, row.get(name)) for name in self.extras}
        return [tokens]

    # Tokenising

    def _texts(self, rows: Sequence[tuple[int, Answers]]) -> list[Tokens]:
        texts = [f"{answers.prompt}{side}" for _, answers in rows for side in answers.sides]
        starts = [len(answers.prompt) for _, answers in rows for _ in answers.sides]
        made = iter(tokenise_texts(self.tokenizer, texts, starts, self.eos, self.pieces))
        return [_joined(answers, [next(made) for _ in answers.sides], self._opening) for _, answers in rows]

    def _chats(self, rows: Sequence[tuple[int, Answers]]) -> list[Tokens]:
        if not rows:
            return []
        rendered = [part for index, answers in rows for part in at_row(index, self.name, self._rendered, answers)]
        texts = [text for text, _ in rendered]
        spans = [[(start, len(text))] for text, start in rendered]
        made = iter(tokenise_chats(self.tokenizer, texts, spans, [NOTHING] * len(texts), self.pieces))
        return [_joined(answers, [next(made) for _ in answers.sides], []) for _, answers in rows]

    def _rendered(self, answers: Answers) -> list[tuple[str, int]]:
        """The text of the prompt with each side, and the character where the side starts in it."""
        conversation = self.template.conversation(answers.row)
        before = {
            answered: _rendered_prompt(conversation, answers.prompt, answered)
            for answered in {side[0]["role"] == "assistant" for side in answers.sides}
        }
        return [
            _with_start(conversation, answers.prompt, side, before[side[0]["role"] == "assistant"])
            for side in answers.sides
        ]

    # Fitting

    def _fitted(self, row: Tokens) -> Tokens:
        prompt, longest = len(row.prompt), max(map(len, row.sides))
        row.length, row.before = prompt + longest, prompt
        kept, room = self.recipe.rooms(prompt, longest)
        if is_overlong(self.recipe, prompt, longest):
            return row.emptied(Fate.DROPPED)
        if kept < prompt:
            row.fate |= Fate.TRUNCATED | Fate.PROMPT_CUT
        if room < longest:
            row.fate |= Fate.TRUNCATED
        if row.fate & Fate.TRUNCATED:
            row = self._cut(row, kept, room)
        if any(len(ids) <= (not row.prompt) for ids in row.sides):
            return row.emptied(Fate.UNTRAINABLE)
        if not self.is_labelled and all(ids == row.sides[0] for ids in self._compared(row)):
            row.fate |= Fate.EQUAL
        return row

    @property
    def is_labelled(self) -> bool:
        return "label" in self.wanted.extras

    def _compared(self, row: Tokens) -> list[list[int]]:
        return row.sides[1:] if self.wanted.ranked else row.sides[1:2]

    def _cut(self, row: Tokens, kept: int, room: int) -> Tokens:
        if row.ref_logps:
            raise ValueError(
                f"it has {len(row.prompt)} + {max(map(len, row.sides))} tokens, more than there is room for, and "
                f"{' and '.join(row.ref_logps)}, which would no longer be of what is left of it. Remove these columns, "
                "or give the limits they were made with"
            )
        tails = [ids[room:] for ids in row.sides]
        row.lost += len(row.prompt) - kept + sum(map(len, tails))
        row.cut = sum(map(bool, tails))
        row.ends = sum(not self.stop_ids.isdisjoint(tail) for tail in tails)
        row.prompt = row.prompt[len(row.prompt) - kept :]
        row.sides = [ids[:room] for ids in row.sides]
        return row

    # Columns

    def _table(self, rows: list[Tokens]) -> pa.Table:
        columns: dict[str, pa.Array] = {"prompt_ids": pa.array([row.prompt for row in rows], TOKEN_LIST)}
        if self.wanted.ranked:
            (side,) = self.wanted.sides
            columns[f"{side}_ids"] = pa.array([row.sides for row in rows], pa.list_(TOKEN_LIST))
        else:
            for i, side in enumerate(self.wanted.written):
                columns[f"{side}_ids"] = pa.array([row.sides[i] for row in rows], TOKEN_LIST)
        for name in self.extras:
            columns[name] = pa.array(
                [row.extras[name] for row in rows], pa.bool_() if name == "label" else pa.float32()
            )
        for name in self.ref_logps:
            columns[name] = pa.array([row.ref_logps.get(name) for row in rows])
        counts = zip(*(row.counts for row in rows), strict=True) if rows else [()] * len(COUNTS)
        numbers = {name: pa.array(values, pa.int32()) for name, values in zip(COUNTS, counts, strict=True)}
        return pa.table(columns | numbers)


def check_effect(recipe: PreferenceRecipe, written: str) -> None:
    """Raise ValueError for arguments of a chat template that rows written so don't need."""
    if recipe.template_options and written != "messages":
        raise ValueError(
            f"chat_template_kwargs={dict(recipe.template_options)!r} would have no effect: the rows are {written}, "
            "which no chat template renders. Remove it"
        )


def is_overlong(recipe: PreferenceRecipe, prompt: int, longest: int) -> bool:
    """Whether a row with a prompt and a longest answer of so many tokens is to be dropped. Raises ValueError where it
    is to be refused."""
    if recipe.overlong == "truncate" or recipe.holds(*recipe.capped(prompt, longest)):
        return False
    if recipe.overlong == "drop":
        return True
    raise ValueError(
        f"its prompt of {prompt} tokens and its longest answer of {longest} are more than max_length="
        f'{recipe.max_length}, and overlong="error" asks to stop here. Raise max_length, shorten the row, or set '
        'overlong to "truncate" or "drop"'
    )


def _joined(answers: Answers, sides: Sequence[Prepared], opening: list[int]) -> Tokens:
    """Prompt and sides of what was tokenised as wholes: the prompt ends where a side starts, or before, where they
    part."""
    starts = [side.labels.count(IGNORE) for side in sides]
    first = sides[0].input_ids
    opened = len(opening) if all(side.input_ids[: len(opening)] == opening for side in sides) else 0
    length = max(min(starts), opened)
    length = min([length, *(common_length(first[:length], side.input_ids) for side in sides[1:])])
    fate = Fate.EMPTY if answers.has_empty_side else NOTHING
    if answers.explicit:
        fate |= next((Fate.MERGED for side in sides if side.fate & Fate.MERGED), NOTHING)
    return Tokens(first[:length], [side.input_ids[length:] for side in sides], {}, fate)


def _rendered_prompt(conversation: Conversation, prompt: list[Message], answered: bool) -> str:
    """The prompt as at inference, with the header of an answer if one follows; nothing where the template can't render
    an answer to nothing."""
    try:
        return conversation.render(prompt, generation_prompt=answered)
    except ValueError:
        if prompt:
            raise
        return ""


def _with_start(conversation: Conversation, prompt: list[Message], side: list[Message], before: str) -> tuple[str, int]:
    """The rendered prompt + side, and the character where the side starts in it.

    Where the template hides that, it is where the rendering is no longer that of the prompt alone, `before`.
    """
    text = conversation.render(prompt + side)
    if text.startswith(before):
        return text, len(before)
    try:
        return completion_start(conversation, prompt, side)
    except ValueError:
        return text, common_prefix(before, text)


# Tokens that rows bring


def token_columns(row: Row, wanted: PreferenceFormat) -> tuple[str, ...]:
    """The columns with the row's answers in tokens; () for a row that has none."""
    written = (wanted.written, PAIRS.sides) if "label" in wanted.extras else (wanted.written,)
    for sides in written:
        for suffix in ("ids", "input_ids"):
            columns = tuple(f"{side}_{suffix}" for side in sides)
            if all(row.get(column) is not None for column in columns):
                return columns
    return ()


def tokens_of(row: Row, columns: Sequence[str], wanted: PreferenceFormat, ref_logps: Sequence[str]) -> Tokens:
    """The row's own tokens; without `prompt_ids` its answers are wholes, and the prompt is what they begin with.

    Raises ValueError for what is no flat list of ids.
    """
    sides = [list(ids) for ids in row[columns[0]]] if wanted.ranked else [list(row[column]) for column in columns]
    if wanted.ranked and len(sides) < 2:
        raise ValueError(f"it has {len(sides)} completions, but a ranking compares two or more. Drop the row")
    prompt = None if row.get("prompt_ids") is None else list(row["prompt_ids"])
    if prompt is None and row.get("prompt_input_ids") is not None:
        raise ValueError(
            "it has prompt_input_ids, beside which answers have been written with and without the prompt; rename the "
            "columns to prompt_ids and, without the prompt, " + ", ".join(f"{side}_ids" for side in wanted.written)
        )
    for column, ids in zip(("prompt_ids", *columns), (prompt or [], *sides), strict=False):
        if ids and not isinstance(ids[0], int):
            raise ValueError(f"its {column} begin with {ids[0]!r}, but tokens are a flat list of whole numbers")
    kept = {name: row[name] for name in ref_logps}
    if prompt is not None:
        return Tokens(prompt, sides, {}, ref_logps=kept)
    length = min([min(map(len, sides)) - 1, *(common_length(sides[0], ids) for ids in sides[1:])])
    length = max(length, 0) if len(sides) > 1 else 0
    return Tokens(sides[0][:length], [ids[length:] for ids in sides], {}, ref_logps=kept)


def as_label(value: Any) -> bool:
    """A label as True or False. Raises ValueError for what is neither one of them nor 1 or 0."""
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise ValueError(f"its label is {value!r}; write true for a good one and false for a bad one (or 1 and 0)")


def as_number(name: str, value: Any) -> float | bool:
    """What the column `name` says of a row: a label, or a number. Raises ValueError for what is no finite number."""
    if name == "label":
        return as_label(value)
    if isinstance(value, int | float) and abs(value) < float("inf"):
        return float(value)
    raise ValueError(f"its {name} is {value!r}, but the loss reckons with it; write a number in every row, or in none")
