"""How one row becomes rows of tokens: a recipe made of settings, and the callable that follows it batch by batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from strop.data.chat import ChatTemplate
from strop.data.collate import IGNORE
from strop.data.formats import Format, Message, Row, at_row, format_of, messages_of, silent_turns
from strop.data.overlong import OVERLONG, TRUNCATION_MODES, around_target, fit, trained_tokens, without_untrainable
from strop.data.pieces import Pieces, pieces_of
from strop.data.report import Fate
from strop.data.tokenize import Prepared, eos_id, tokenise_chats, tokenise_texts
from strop.data.turns import Span, assistant_spans, completion_start

TURNS = ("all", "last", "expand")
FormattingFunc = Callable[[Row], str | list[str]]
Chat = tuple[str, list[Span], Fate]
"""Rendered text, the character spans to train, what is worth counting about it."""

TOKEN_LIST = pa.list_(pa.int32())
EMPTY_ANSWER = "it would teach the model to answer nothing. Fill it in, or drop such rows with dataset.filter"
COUNTS = ("fate", "length", "lost", "before", "trained")
"""Numbers that stand beside each row until the report has counted them."""


@dataclass(frozen=True)
class Recipe:
    """The settings that decide what a row becomes. Two equal recipes prepare equal rows equally."""

    text_field: str = "text"
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    overlong: str = "truncate"
    eos_token: str | None = None
    completion_only: bool | None = None
    assistant_only: bool = False
    turns: str = "all"
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        for name, value, known in (
            ("overlong", self.overlong, OVERLONG),
            ("truncation_mode", self.truncation_mode, TRUNCATION_MODES),
            ("train_on_turns", self.turns, TURNS),
        ):
            if value not in known:
                near = get_close_matches(str(value), known, n=1)
                raise ValueError(
                    f"{name}={value!r} is none of {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else "")
                )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length={self.max_length} leaves no token of any row; use None for no limit")
        if self.turns != "all" and not self.assistant_only:
            raise ValueError(
                f"train_on_turns={self.turns!r} chooses among the assistant's turns, but assistant_only_loss is off "
                f"and everything is "
                "trained; set assistant_only_loss=True"
            )

    @classmethod
    def of(cls, args: Any, packing: bool) -> "Recipe":
        """The recipe in the fields of DataArguments, PackingArguments and TargetArguments.

        What packing does to long rows itself is left to it: "bfd_split" splits them and "wrapped" cuts everything.
        """
        overlong, max_length = args.overlong, args.max_length
        if packing and overlong in ("truncate", "split"):
            if args.packing_strategy == "wrapped":
                max_length = None
            elif args.packing_strategy == "bfd_split":
                overlong = "split"
        return cls(
            text_field=args.dataset_text_field,
            max_length=max_length,
            truncation_mode=args.truncation_mode,
            overlong=overlong,
            eos_token=args.eos_token,
            completion_only=args.completion_only_loss,
            assistant_only=args.assistant_only_loss,
            turns=args.train_on_turns,
            template_options=dict(getattr(args, "chat_template_kwargs", None) or {}),
        )


def check_targets(recipe: Recipe, found: Format, formats: bool) -> None:
    """Raise ValueError where rows lack what `recipe` asks to train on. `formats`: a formatting function is given."""
    if found.kind == "tokens" and formats:
        raise ValueError(
            "a formatting_func is given but the rows are tokenised already (input_ids), so it could have no effect. "
            "Leave one of them out"
        )
    if formats and recipe.completion_only:
        raise ValueError(
            "completion_only_loss=True needs to know where the completion starts, but formatting_func makes one text "
            "of each row. Map the "
            "data set to prompt and completion yourself, or leave completion_only_loss unset"
        )
    if recipe.template_options and (formats or not (found.conversational or found.kind == "tokens")):
        raise ValueError(
            f"chat_template_kwargs={dict(recipe.template_options)!r} would have no effect: the rows are {found}, which "
            "no chat template renders. Remove it"
        )
    decided = "labels" in found.columns
    if (
        recipe.completion_only
        and not decided
        and found.kind != "prompt_completion"
        and "completion_mask" not in found.columns
    ):
        raise ValueError(
            f"completion_only_loss=True, but the rows are {found} and have no completion. Give prompt and completion "
            f"columns, or for "
            "conversations set assistant_only_loss=True instead"
        )
    if (
        recipe.assistant_only
        and not decided
        and not (found.conversational and not formats)
        and "assistant_masks" not in found.columns
    ):
        raise ValueError(
            f"assistant_only_loss=True, but the rows are {found}, in which nobody is told apart. It needs "
            f"conversations (messages, or "
            "prompt and completion as lists of messages)"
        )


@dataclass
class RowMaker:
    """Follows a recipe: batches of rows, as columns, to a table of input_ids, labels, seq_lengths and `COUNTS`.

    A row that is dropped stays in the table, without tokens, to be counted. Raises ValueError naming the row that
    can't be prepared.
    """

    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe
    found: Format
    name: str = "train"
    formatting_func: FormattingFunc | None = None

    def __call__(self, batch: Mapping[str, Sequence], indices: Sequence[int]) -> pa.Table:
        columns = list(batch)
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*(batch[c] for c in columns), strict=True)]
        made: list[Prepared] = []
        before: list[int] = []
        for index, row in zip(*self._tokenised(rows, indices), strict=True):
            row.length = row.length or len(row.input_ids)
            pieces = [row] if row.seq_lengths else at_row(index, self.name, self._fitted, row)
            made += pieces
            before += [_before_first_target(row) if piece.fate & Fate.UNTRAINABLE else 0 for piece in pieces]
        return as_table(made, before)

    def _fitted(self, row: Prepared) -> list[Prepared]:
        recipe = self.recipe
        pieces = fit(row, recipe.max_length, recipe.overlong, recipe.truncation_mode)
        return [piece if piece.fate & Fate.DROPPED else without_untrainable(piece) for piece in pieces]

    def _tokenised(self, rows: Sequence[Row], indices: Sequence[int]) -> tuple[list[int], list[Prepared]]:
        """The rows that `rows` make, each with the index of the row it comes from."""
        if self.formatting_func is not None:
            write = partial(formatted, self.formatting_func)
            texts = [at_row(i, self.name, write, row) for i, row in zip(indices, rows, strict=True)]
            origins = [i for i, parts in zip(indices, texts, strict=True) for _ in parts]
            return origins, tokenise_texts(
                self.tokenizer, [text for parts in texts for text in parts], None, self.eos, self.pieces
            )
        for index, row in zip(indices, rows, strict=True):
            at_row(index, self.name, self._check_format, row)
        if self.found.kind == "tokens":
            return list(indices), [
                at_row(i, self.name, self._tokens, row) for i, row in zip(indices, rows, strict=True)
            ]
        if self.found.conversational:
            return self._chats(rows, indices)
        for index, row in zip(indices, rows, strict=True):
            at_row(index, self.name, _refuse_empty_completion, row)
        return list(indices), self._texts(rows)

    def _check_format(self, row: Row) -> None:
        for column in self.found.columns:
            value = row.get(column)
            expected = list if self.found.conversational or self.found.kind == "tokens" else str
            if not isinstance(value, expected):
                found = format_of(row, self.recipe.text_field)
                raise ValueError(
                    f"column {column!r} holds {type(value).__name__} ({found}), but the first rows are {self.found}; "
                    f"write all rows alike"
                )

    @cached_property
    def eos(self) -> int | None:
        return eos_id(self.tokenizer, self.recipe.eos_token)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.recipe.template_options)

    @cached_property
    def pieces(self) -> Pieces | None:
        return pieces_of(self.tokenizer)

    @property
    def key(self) -> tuple[str, ...]:
        """What the rows it makes depend on, beside its tokenizer."""
        return repr(self.recipe), repr(self.found), Hasher.hash(self.formatting_func)

    @property
    def trains_completion_only(self) -> bool:
        return self.recipe.completion_only is not False

    # Text

    def _texts(self, rows: Sequence[Row]) -> list[Prepared]:
        if self.found.kind == "text":
            return tokenise_texts(
                self.tokenizer, [row[self.found.columns[0]] for row in rows], None, self.eos, self.pieces
            )
        texts = [row["prompt"] + row["completion"] for row in rows]
        starts = [len(row["prompt"]) for row in rows] if self.trains_completion_only else None
        return tokenise_texts(self.tokenizer, texts, starts, self.eos, self.pieces)

    # Tokens

    def _tokens(self, row: Row) -> Prepared:
        """An already tokenised row; labels are taken as they are, else made from the masks."""
        ids, masks = row["input_ids"], []
        if ids and not isinstance(ids[0], int):
            raise ValueError(
                f"its input_ids begin with {ids[0]!r}, but a row is a flat list of whole numbers. A tokenizer gives "
                "that for one text, without return_tensors"
            )
        if row.get("completion_mask") is not None and self.trains_completion_only:
            masks.append("completion_mask")
        if row.get("assistant_masks") is not None:
            masks.append("assistant_masks")
        if row.get("attention_mask") is not None and not all(row["attention_mask"]):
            raise ValueError(
                "its attention_mask has zeros, so it was padded when it was tokenised, and padding would be trained. "
                "Tokenise without padding; batches are padded, or packed, by themselves"
            )
        labels = row.get("labels")
        for column in ("labels",) if labels is not None else masks:
            if len(row[column]) != len(ids):
                raise ValueError(f"has {len(ids)} input_ids but {len(row[column])} {column}; each token needs one")
        if labels is None:
            labels = [token if all(row[mask][i] for mask in masks) else IGNORE for i, token in enumerate(ids)]
        return Prepared(ids, labels, length=len(ids), seq_lengths=row.get("seq_lengths"))

    # Conversations

    def _chats(self, rows: Sequence[Row], indices: Sequence[int]) -> tuple[list[int], list[Prepared]]:
        chats = [at_row(i, self.name, self._rendered, row) for i, row in zip(indices, rows, strict=True)]
        origins = [i for i, parts in zip(indices, chats, strict=True) for _ in parts]
        made = self._tokenise_chats([chat for parts in chats for chat in parts])
        limit = self.recipe.max_length
        if self.recipe.turns != "all" and self.recipe.overlong == "truncate" and limit is not None:
            sources = [(row, k) for row, parts in zip(rows, chats, strict=True) for k in range(len(parts))]
            made = [self._shortened(whole, limit, *source) for whole, source in zip(made, sources, strict=True)]
        return origins, made

    def _tokenise_chats(self, chats: Sequence[Chat]) -> list[Prepared]:
        texts, spans, fates = zip(*chats, strict=True) if chats else ((), (), ())
        return tokenise_chats(self.tokenizer, texts, spans, fates, self.pieces) if chats else []

    def _conversations(self, row: Row) -> tuple[list[list[dict]], int]:
        """The conversations to render, one a turn with train_on_turns="expand", and how many messages are prompt."""
        if self.found.kind == "messages":
            messages, prompt = messages_of(row[self.found.columns[0]], self.template.roles), 0
        else:
            messages = messages_of(row["prompt"], self.template.roles)
            prompt = len(messages)
            messages = messages + messages_of(row["completion"], self.template.roles)
        if self.recipe.turns != "expand":
            return [messages], prompt
        first = prompt if self.trains_completion_only else 0
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant" and k >= first]
        return [messages[: k + 1] for k in turns] or [messages], prompt

    def _rendered(self, row: Row) -> list[Chat]:
        conversations, prompt = self._conversations(row)
        for messages in conversations:
            self._refuse_silent_turns(messages, prompt)
        return [self._chat(row, messages, prompt) for messages in conversations]

    def _refuse_silent_turns(self, messages: list[Message], prompt: int) -> None:
        """Raise ValueError if the assistant says nothing in a turn that is trained."""
        first = prompt if self.trains_completion_only else 0
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant" and k >= first]
        trained = turns if self.recipe.turns == "all" else turns[-1:]
        for k in silent_turns(messages):
            if k in trained:
                raise ValueError(f"message {k} is an answer with nothing in it ({messages[k]}); {EMPTY_ANSWER}")

    def _chat(self, row: Row, messages: list[dict], prompt: int) -> Chat:
        conversation = self.template.conversation(row)
        start, text = 0, None
        if prompt and prompt < len(messages) and self.trains_completion_only:
            text, start = completion_start(conversation, messages[:prompt], messages[prompt:])
        if not self.recipe.assistant_only:
            text = conversation.render(messages) if text is None else text
            return text, [(start, len(text))], Fate(0)
        text, spans, rewritten = assistant_spans(
            conversation, messages, "all" if self.recipe.turns == "all" else "last"
        )
        spans = [(max(start, begin), end) for begin, end in spans if end > start]
        return text, spans, Fate.REWRITTEN if rewritten else Fate(0)

    def _shortened(self, whole: Prepared, limit: int, row: Row, k: int) -> Prepared:
        """A conversation of which the last turn is trained, without its oldest turns if it is too long with them, and
        without the start of what is asked last if that is too long alone."""
        shorter = whole
        messages = self._conversations(row)[0][k] if len(whole.input_ids) > limit else []
        for kept in _without_oldest(messages):
            if len(shorter.input_ids) <= limit:
                break
            shorter = self._tokenise_chats([self._chat(row, kept, 0)])[0]
        if self.recipe.truncation_mode == "keep_start":
            shorter = around_target(shorter, limit)
        if shorter is not whole:
            lost = len(whole.input_ids) - len(shorter.input_ids)
            shorter = Prepared(shorter.input_ids, shorter.labels, whole.fate | Fate.TRUNCATED, whole.length, lost)
        return shorter


def _refuse_empty_completion(row: Row) -> None:
    if "completion" in row and not row["completion"].strip():
        raise ValueError(f"the completion {row['completion']!r} is empty; {EMPTY_ANSWER}")


def formatted(formatting_func: FormattingFunc, row: Row) -> list[str]:
    """The texts that `formatting_func` makes of `row`. Raises ValueError where it fails or returns something else."""
    try:
        result = formatting_func(row)
    except Exception as error:
        raise ValueError(
            f"formatting_func failed with {type(error).__name__}: {error}. It is called with one row, a dict of "
            f"{sorted(row)}; have it return the row's text"
        ) from error
    texts = [result] if isinstance(result, str) else result
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"formatting_func returned {type(result).__name__} {str(result)[:60]!r}; expected a string or a list "
            f"of strings"
        )
    return texts


def _without_oldest(messages: list[dict]) -> list[list[dict]]:
    """`messages` from its second, third, ... user turn on, behind the opening system message."""
    system = [message for message in messages[:1] if message["role"] in ("system", "developer")]
    users = [k for k, message in enumerate(messages) if message["role"] == "user"]
    return [system + messages[k:] for k in users[1:]]


def _before_first_target(row: Prepared) -> int:
    return next((i for i, label in enumerate(row.labels) if label != IGNORE and i), len(row.labels))


def as_table(rows: list[Prepared], before: list[int]) -> pa.Table:
    """`rows` as columns; `before` says how many tokens stood before the first one to train."""
    columns = {
        "input_ids": pa.array([row.input_ids for row in rows], TOKEN_LIST),
        "labels": pa.array([row.labels for row in rows], TOKEN_LIST),
    }
    if any(row.seq_lengths is not None for row in rows):
        columns["seq_lengths"] = pa.array([row.seq_lengths for row in rows], TOKEN_LIST)
    numbers = ([int(row.fate) for row in rows], [row.length for row in rows], [row.lost for row in rows], before)
    counts = (*numbers, [trained_tokens(row) for row in rows])
    return pa.table(columns | {name: pa.array(values, pa.int32()) for name, values in zip(COUNTS, counts, strict=True)})
