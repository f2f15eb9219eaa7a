"""What preparation did to a data set, in numbers."""

from dataclasses import asdict, dataclass, field
from enum import IntFlag

import numpy as np


class Fate(IntFlag):
    """What happened to a row; kept beside it in one number while it is prepared."""

    TRUNCATED = 1
    DROPPED = 2
    """Longer than max_length under overlong="drop"."""
    UNTRAINABLE = 4
    """No token to train is left."""
    PIECE = 8
    """One of several that a row was split into, but not the first."""
    SPLIT = 16
    """The first of several that a row was split into."""
    MERGED = 32
    """A token holds the end of the prompt and the start of the completion."""
    REWRITTEN = 64
    """The chat template renders an earlier turn otherwise than when it was the last."""
    PROMPT_CUT = 128
    """The prompt lost its start."""
    EQUAL = 256
    """All answers that are compared have the same tokens."""
    EMPTY = 512
    """An answer says nothing."""


GONE = Fate.DROPPED | Fate.UNTRAINABLE


@dataclass
class PreparationReport:
    """Counts over the rows of one data set. For a streamed one they grow as rows pass.

    Lengths are those of whole rows in tokens, before anything is cut.
    """

    name: str = "train"
    rows_in: int = 0
    rows_out: int = 0
    """Rows kept, before packing."""
    truncated_rows: int = 0
    dropped_rows: int = 0
    """Rows longer than max_length, dropped because overlong="drop" asks for it."""
    split_rows: int = 0
    """Rows longer than max_length, cut into several."""
    untrainable_rows: int = 0
    """Rows or pieces dropped because no token to train was left in them."""
    merged_boundaries: int = 0
    """Rows with a token that holds both the end of the prompt and the start of the completion; it is trained."""
    rewritten_rows: int = 0
    """Rows whose earlier turns the chat template renders otherwise than at inference."""
    tokens: int = 0
    """Tokens in the rows kept."""
    trained_tokens: int = 0
    """Tokens with a label in the rows kept, the first of a row excepted, which nothing predicts."""
    tokens_lost: int = 0
    """Tokens cut off, or in rows that were dropped for their length."""
    longest_prompt: int = 0
    """Most tokens before the first one to train, over all rows."""
    packed_rows: int | None = None
    """Rows after packing, None without."""
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64), repr=False)
    """How many rows have each length."""

    def count(self, fates: np.ndarray, lengths: np.ndarray, lost: np.ndarray, prompts: np.ndarray) -> None:
        """Add rows: what became of each, its whole length, the tokens it lost, those before its first trained one."""

        def having(fate: Fate) -> int:
            return int(np.count_nonzero(fates & int(fate)))

        whole = fates & int(Fate.PIECE) == 0
        self.rows_out += len(fates) - having(GONE)
        self.truncated_rows += having(Fate.TRUNCATED)
        self.dropped_rows += having(Fate.DROPPED)
        self.split_rows += having(Fate.SPLIT)
        self.untrainable_rows += having(Fate.UNTRAINABLE)
        self.merged_boundaries += having(Fate.MERGED)
        self.rewritten_rows += having(Fate.REWRITTEN)
        self.tokens_lost += int(lost.sum())
        self.longest_prompt = max(self.longest_prompt, int(prompts.max(initial=0)))
        counts = np.bincount(lengths[whole], minlength=len(self.histogram))
        counts[: len(self.histogram)] += self.histogram
        self.histogram = counts

    def percentile(self, percent: float) -> int:
        """The least length that `percent` % of rows do not exceed; 0 without rows."""
        below = np.cumsum(self.histogram)
        return int(np.searchsorted(below, max(1, np.ceil(percent / 100 * below[-1])))) if below[-1] else 0

    def to_dict(self) -> dict[str, int | str | None]:
        """The counts, and the percentiles of the lengths as length_p50, length_p90, length_p99 and length_max."""
        counts = asdict(self)
        del counts["histogram"]
        return (
            counts | {f"length_p{p}": self.percentile(p) for p in (50, 90, 99)} | {"length_max": self.percentile(100)}
        )

    def __str__(self) -> str:
        shares = [
            (self.truncated_rows, "truncated"),
            (self.split_rows, "split"),
            (self.dropped_rows, "dropped as too long"),
            (self.untrainable_rows, "without a trainable token dropped"),
        ]
        parts = [f"{self.rows_in} rows in, {self.rows_out} out"]
        parts += [f"packed into {self.packed_rows}"] if self.packed_rows is not None else []
        parts += [f"{count} {what}" for count, what in shares if count]
        parts += [f"{self.tokens} tokens, {self.trained_tokens} of them trained"]
        parts += [f"{self.tokens_lost} lost"] if self.tokens_lost else []
        p50, p90, p99, longest = (self.percentile(p) for p in (50, 90, 99, 100))
        return f"{self.name}: {', '.join(parts)}; lengths p50 {p50}, p90 {p90}, p99 {p99}, max {longest}"


@dataclass
class PreferenceReport(PreparationReport):
    """Counts over rows of a prompt with answers, which are called completions here.

    A row's length is that of its prompt with its longest completion. `trained_tokens` are those of completions.
    """

    truncated_prompts: int = 0
    """Rows whose prompt lost its start."""
    truncated_completions: int = 0
    """Completions whose end was cut off."""
    lost_ends: int = 0
    """Completions that lost the token that ends them."""
    equal_rows: int = 0
    """Rows kept whose completions are the same tokens, after truncation: there is nothing to prefer."""
    empty_sides: int = 0
    """Rows with a completion that says nothing."""

    def count_rows(self, counts: dict[str, np.ndarray], rows_in: int) -> None:
        """Add rows by their `COUNTS`: as in `count`, and tokens, completions cut and ends lost."""

        def having(fate: Fate) -> int:
            return int(np.count_nonzero(counts["fate"] & int(fate)))

        self.rows_in += rows_in
        self.count(counts["fate"], counts["length"], counts["lost"], counts["before"])
        self.tokens += int(counts["tokens"].sum())
        self.trained_tokens += int(counts["trained"].sum())
        self.truncated_prompts += having(Fate.PROMPT_CUT)
        self.truncated_completions += int(counts["cut"].sum())
        self.lost_ends += int(counts["ends"].sum())
        self.equal_rows += having(Fate.EQUAL)
        self.empty_sides += having(Fate.EMPTY)

    def __str__(self) -> str:
        shares = [
            (self.truncated_prompts, "prompts truncated"),
            (self.truncated_completions, "completions truncated"),
            (self.lost_ends, "ends lost"),
            (self.equal_rows, "with equal completions"),
            (self.empty_sides, "with an empty completion"),
        ]
        more = "".join(f"; {count} {what}" for count, what in shares if count)
        return super().__str__() + more
