"""Settings of the data path. A field's docstring is its help on the command line and in the docs."""

from dataclasses import dataclass
from typing import Any


@dataclass
class DataArguments:
    """How rows become tokens."""

    dataset_text_field: str = "text"
    """Column of plain-text rows."""

    dataset_kwargs: dict[str, Any] | str | None = None
    """{"skip_prepare_dataset": true} hands the rows to the collator as they are; no other key is known."""

    dataset_num_proc: int | None = None
    """Worker processes that prepare map-style data sets; one if not set."""

    max_length: int | None = 1024
    """Longest row in tokens, and the length of packed rows; None for no limit (not with packing)."""

    truncation_mode: str = "keep_start"
    """Which end of an over-long row is kept: "keep_start" or "keep_end"."""

    overlong: str = "truncate"
    """What happens to rows above max_length: "truncate", "drop", "split" into several rows, or "error"."""

    shuffle_dataset: bool = False
    """Shuffle once with `seed` while preparing (the trainer shuffles every epoch anyway)."""

    eos_token: str | None = None
    """End-of-sequence token, if not the tokenizer's own; must be in its vocabulary."""

    pad_token: str | None = None
    """Padding token, if not the tokenizer's own (else its end-of-sequence token is used); must be in its vocabulary."""

    chat_template_path: str | None = None
    """A .jinja file with a chat template, or a model or folder whose tokenizer's template (and tokens) to adopt."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template, e.g. {"enable_thinking": false}; those in a row's own chat_template_kwargs
    column come on top."""


@dataclass
class PackingArguments:
    """How rows share a forward pass."""

    packing: bool = False
    """Put several rows into one of max_length tokens; rows never see each other (but see
    packing_strategy="wrapped")."""

    packing_strategy: str = "bfd"
    """"bfd" truncates rows to max_length and fits them best-first decreasing; "bfd_split" cuts long rows into several
    instead of truncating; "wrapped" concatenates everything and cuts every max_length tokens, so rows do see each
    other."""

    eval_packing: bool | None = None
    """Pack the evaluation set too; like `packing` if not set."""

    padding_free: bool = False
    """Require the packed layout: refuse to run where the model would have to be given padded rows."""

    layout: str = "auto"
    """"packed": rows of a micro-batch share one stream without padding. "padded": rows padded to one length. "auto":
    packed wherever the model allows it, verified against padded on the first batch."""

    pad_to_multiple_of: int | str | None = "auto"
    """Round the time axis up to a multiple of this; "auto" or None for none."""


@dataclass
class TargetArguments:
    """Which tokens are trained."""

    completion_only_loss: bool | None = None
    """Train on the completion of prompt-completion rows only; if not set, yes for such rows."""

    assistant_only_loss: bool = False
    """Train on what the assistant says (and its end-of-turn marker) only. Works with any chat template."""

    train_on_turns: str = "all"
    """With assistant_only_loss: "all" turns of the assistant, the "last" one, or "expand" a conversation into one row a
    turn, each rendered as at inference."""


@dataclass
class PreferenceArguments:
    """How rows with answers to a prompt become tokens, and share a forward pass."""

    dataset_num_proc: int | None = None
    """Worker processes that prepare map-style data sets; one if not set."""

    max_length: int | None = 1024
    """Longest prompt with one completion, in tokens; None for no limit."""

    max_prompt_length: int | None = None
    """Longest prompt in tokens: of a longer one the end is kept. None for no limit but max_length."""

    max_completion_length: int | None = None
    """Longest completion in tokens: of a longer one the start is kept. None for no limit but max_length."""

    truncation_mode: str = "keep_start"
    """What gives way above max_length: "keep_start" cuts the end of completions, "keep_end" the start of the prompt,
    alike for all its completions, but for its last token."""

    overlong: str = "truncate"
    """What happens to rows above max_length: "truncate", "drop" or "error"."""

    eos_token: str | None = None
    """End-of-sequence token, if not the tokenizer's own; must be in its vocabulary."""

    pad_token: str | None = None
    """Padding token, if not the tokenizer's own (else its end-of-sequence token is used); must be in its vocabulary."""

    chat_template_path: str | None = None
    """A .jinja file with a chat template, or a model or folder whose tokenizer's template (and tokens) to adopt."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template, e.g. {"enable_thinking": false}; those in a row's own chat_template_kwargs
    column come on top."""

    padding_free: bool = False
    """Require the packed layout: refuse to run where the model would have to be given padded rows."""

    layout: str = "auto"
    """"packed": rows of a micro-batch share one stream without padding, and a prompt stands in it once. "padded": rows
    padded to one length, each with its prompt. "auto": packed wherever the model allows it, verified on the first
    batch."""

    pad_to_multiple_of: int | str | None = "auto"
    """Round the time axis up to a multiple of this; "auto" or None for none."""

    disable_dropout: bool = True
    """Switch off dropout, so that policy and reference are compared without noise."""


@dataclass
class StepArguments:
    """How the steps of a solution are told apart and judged."""

    step_separator: str = "\n"
    """Text behind each step; the judgement of the step is read at its last token."""

    train_on_last_step_only: bool = False
    """Train on the judgement of the last step only (the evaluation set keeps all)."""
