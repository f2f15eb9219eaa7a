"""What flows from a prompt to a batch. Token lists are plain Python; tensors begin at the collator."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from torch import nn

from strop.rewards.texts import Words

FinishReason = Literal["stop", "length"]
"""A stop id or a stop string came, or the tokens ran out."""


class Completion(NamedTuple):
    """What was written after one prompt, the stop id included.

    Example: a policy of p(A) = 0.5, p(B) = 0.3, p(C) = 0.2 under `top_p=0.8`, which leaves A and B

        token_ids      = [B]
        logps          = [log 0.3]          the policy's, what `strop.models.logps` finds in training
        sampled_logps  = [log 0.3 / 0.8]    of the draw
    """

    token_ids: list[int]
    logps: list[float]
    """log p of each token under the policy at the sampling temperature, over the whole vocabulary: the denominator of a
    ratio whose numerator is a training forward at this temperature. Filters and penalties are not in it."""
    finish_reason: FinishReason
    sampled_logps: list[float] | None = None
    """log p of each token under exactly the distribution it was drawn from; None where that is the one of `logps`."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: repetition penalty, temperature, then top-k, top-p, min-p, each on what the last one left.

    Raises ValueError for values that leave nothing to draw.
    """

    max_tokens: int = 256
    """Tokens a completion at most."""
    temperature: float = 1.0
    """Divides the logits. 0: the likeliest token always, with log-probabilities at temperature 1."""
    top_k: int | None = None
    """Only the k likeliest tokens; None or 0: all."""
    top_p: float = 1.0
    """Only the fewest likeliest tokens that hold this much probability."""
    min_p: float | None = None
    """Only tokens with at least this fraction of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Logits of tokens already there, in the prompt or after, are divided by it if positive, else multiplied
    (arXiv:1909.05858, section 4.1)."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; the token that completes one is kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion, besides the model's and the tokenizer's own."""
    ignore_eos: bool = False
    """Only `stop` and `stop_token_ids` end a completion."""
    seed: int = 0

    def __post_init__(self):
        for name, legal, why in (
            ("max_tokens", self.max_tokens >= 1, "a completion has at least one token"),
            ("temperature", self.temperature >= 0, "it divides logits; 0 takes the likeliest token"),
            ("top_k", self.top_k is None or self.top_k >= 0, "it counts tokens; None or 0 keeps all"),
            ("top_p", 0 < self.top_p <= 1, "it is the probability kept; 1 keeps all"),
            (
                "min_p",
                self.min_p is None or 0 <= self.min_p <= 1,
                "it is a fraction of the likeliest token's probability",
            ),
            ("repetition_penalty", self.repetition_penalty > 0, "it divides logits; 1 changes none"),
        ):
            if not legal:
                raise ValueError(f"{name}={getattr(self, name)} can't be sampled with: {why}")
        if isinstance(self.stop, str):
            raise ValueError(f"stop={self.stop!r} is one text; write a tuple of texts, ({self.stop!r},)")
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which every completion contains. Drop it")

    @property
    def is_filtered(self) -> bool:
        """Tokens are drawn from another distribution than the policy's at this temperature."""
        return bool(self.temperature == 0 or self.top_k or self.top_p < 1 or self.min_p or self.repetition_penalty != 1)


class Generator(Protocol):
    """Tokens in, tokens out: a generator knows no chat template, no data set and no reward."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        rows: Sequence[int] | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> list[Completion]:
        """One completion a prompt, in order; repeat a prompt for several.

        `rows` numbers the completions of a run, by default 0, 1, ...: a text follows from the sampling's seed, the
        row's number and its prompt, whatever it is generated with. `max_tokens` of single rows, each at most the
        sampling's.
        """

    def sync(self, model: nn.Module) -> None:
        """Take over the weights of `model`; called once before each round of generation."""


@dataclass(slots=True)
class Rollout:
    """One sampled conversation and what it earned.

    Example: prompt P P, the model says A A, a tool answers E, the model says B

        token_ids       = [P, P, A, A, E, B]
        completion_mask = [0, 0, 1, 1, 0, 1]
        logps           = [0, 0, a, a, 0, b]
        prompt_length   = 2
    """

    row: dict[str, Any]
    """The row of the data set, handed to reward functions."""
    token_ids: list[int]
    completion_mask: list[int]
    """1 on what the model wrote."""
    logps: list[float]
    """`Completion.logps` where the mask is 1, 0 elsewhere."""
    finish_reason: FinishReason
    rewards: dict[str, float | None] = field(default_factory=dict)
    """By name; None where a reward doesn't apply. An episode that judges itself fills in its own (`own_rewards`)."""
    advantage: float = 0.0
    sampled_logps: list[float] | None = None
    """`Completion.sampled_logps` where the mask is 1, 0 elsewhere."""
    prompt_length: int = 0
    """Tokens before the first turn of the model."""
    prompt: Words = ""
    """What reward functions are told was asked."""
    completion: Words = ""
    """What reward functions are told was answered: text for a text, the messages after the prompt for messages."""
    columns: dict[str, Any] = field(default_factory=dict)
    """What reward functions are given besides the row's columns, e.g. {"environments": environment}."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What reward functions gave to `log_extra`, by column."""
    old_logps: list[float] | None = None
    """log p of each token under the policy that a ratio is taken to; None where that is the policy in training."""
    ref_logps: list[float] | None = None
    """log p of each token under the reference, if there is one."""
    old_values: list[float] | None = None
    """Value before each token, if there is a value function."""
    token_advantages: list[float] | None = None
    """An advantage of each token, in the place of `advantage`."""
    returns: list[float] | None = None
    """What the value before each token is trained towards."""
    kl_weight: float = 1.0
    """0 where the KL divergence from the reference leaves it alone."""
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(sum, weight) of what the episode measured, e.g. {"tools/call_frequency": (2, 1)}; added up over rollouts."""

    @classmethod
    def single_turn(cls, row: dict[str, Any], prompt_ids: Sequence[int], written: Completion, **more: Any) -> "Rollout":
        """A rollout of one answer."""
        before, after = len(prompt_ids), len(written.token_ids)
        sampled = written.sampled_logps
        return cls(
            row=row,
            token_ids=[*prompt_ids, *written.token_ids],
            completion_mask=[0] * before + [1] * after,
            logps=[0.0] * before + written.logps,
            finish_reason=written.finish_reason,
            sampled_logps=None if sampled is None else [0.0] * before + sampled,
            prompt_length=before,
            **more,
        )

    @property
    def completion_ids(self) -> list[int]:
        """What comes after the prompt, answers of tools among it."""
        return self.token_ids[self.prompt_length :]

    @property
    def length(self) -> int:
        """Tokens the model wrote."""
        return sum(self.completion_mask)
