"""What is measured, and how. A field's docstring is its help on the command line and in the docs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.evals.statistics import CONFIDENCE, student_quantile

LOSS, PAIRS = "loss", "pairs"
GIVEN_ANSWERS = (LOSS, PAIRS)
"""Metrics of answers that are in the rows; all others are rewards of what the model answers."""


@dataclass
class EvalOptions:
    """What is measured, and how."""

    metrics: list[Any] = field(default_factory=list)
    """loss: of the answers in the rows, in nats a token. pairs: how often the chosen answer is above the rejected one.
    Anything else is a reward of what the model answers: accuracy, think_format, my_rewards.short, the folder of a
    reward model. If nothing is named, what the rows have answers for."""

    num_samples: int = 1
    """Answers to each prompt."""

    k: list[int] | None = None
    """Gives pass@k of rewards that are 0 or 1, or of all with a threshold; if not set, 1 and num_samples for several
    samples."""

    threshold: float | None = None
    """The reward from which an answer counts as correct in pass@k."""

    max_new_tokens: int = 256
    """Longest answer in tokens."""

    temperature: float | None = None
    """0 always takes the likeliest token; above, tokens are drawn. If not set, 0 for one sample and 1 for several."""

    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability; needs a temperature."""

    seed: int = 0
    """Random state of the draws, and of the order in which a judge is shown answers."""

    batch_size: int = 8
    """Rows read at a time for losses, pairs and scores."""

    max_rows: int | None = None
    """Answers written at a time; 64 on a CPU and 256 elsewhere if not set."""

    max_length: int | None = None
    """Longest row in tokens for the loss; None for no limit."""

    dataset_text_field: str | None = None
    """Column of plain-text rows for the loss; "text" if not set."""

    assistant_only_loss: bool | None = None
    """Take the loss of what the assistant says only."""

    train_on_turns: str | None = None
    """Of assistant_only_loss: all turns of the assistant, or the last one only; all if not set."""

    completion_only_loss: bool | None = None
    """Take the loss of the completion of prompt-completion rows only; if not set, yes for such rows."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template; those in a row's own chat_template_kwargs column come on top."""

    tasks: list[str] = field(default_factory=list)
    """Tasks of lm-eval, e.g. gsm8k; needs the package lm-eval."""

    num_fewshot: int | None = None
    """Examples before each question of lm-eval's tasks; the task's own number if not set."""

    limit: int | None = None
    """Rows that are looked at, the first ones; all if not set. Of lm-eval's tasks, questions each."""

    confidence: float = CONFIDENCE
    """How sure intervals are."""

    def __post_init__(self):
        for name in ("num_samples", "max_new_tokens", "batch_size", "max_rows", "max_length", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} leaves nothing to look at; it must be at least 1.")
        student_quantile(self.confidence, 1)
        if self.num_fewshot is not None and not self.tasks:
            raise ValueError(f"num_fewshot={self.num_fewshot} has no effect without tasks. Name some, or drop it.")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0.")
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"num_samples={self.num_samples} answers are all the same at temperature=0, where the likeliest token "
                "is taken. Set a temperature, e.g. 0.8, or leave it out."
            )
        if self.drawn_at == 0 and self.top_p < 1:
            raise ValueError(
                f"top_p={self.top_p} has no effect at temperature=0, where the likeliest token is taken. Set a "
                "temperature, e.g. 0.7, or leave top_p out."
            )
        wrong = [k for k in self.k or [] if not 1 <= k <= self.num_samples]
        if wrong:
            raise ValueError(
                f"pass@{wrong[0]} is of {wrong[0]} samples, but num_samples={self.num_samples}; k must be from 1 to it."
            )

    @property
    def drawn_at(self) -> float:
        """The temperature."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.num_samples == 1 else 1.0

    @property
    def pass_ks(self) -> list[int]:
        """The k of pass@k."""
        if self.k is not None:
            return sorted(set(self.k))
        return [1, self.num_samples] if self.num_samples > 1 else [1] if self.threshold is not None else []

    def refuse_unused(self, generates: bool, has_rewards: bool, metrics: Sequence[Any]) -> None:
        """Raises ValueError for options that what is measured doesn't read."""
        unread: dict[str, str] = {}
        if not generates:
            names = ("num_samples", "k", "threshold", "max_new_tokens", "temperature", "top_p", "max_rows")
            unread |= dict.fromkeys(names, "the model answers nothing: no reward and no judge is asked for")
        if not has_rewards:
            unread |= dict.fromkeys(("k", "threshold"), "no reward is asked for")
        if LOSS not in metrics:
            names = (
                "max_length",
                "dataset_text_field",
                "assistant_only_loss",
                "train_on_turns",
                "completion_only_loss",
            )
            names += ("train_on_turns",)
            unread |= dict.fromkeys(names, "the loss is not asked for")
        plain = EvalOptions()
        for name, why in unread.items():
            if getattr(self, name) != getattr(plain, name):
                raise ValueError(f"{name}={getattr(self, name)!r} has no effect: {why}. Drop it.")
