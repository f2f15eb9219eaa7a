"""Episodes: what happens between a row of the data set and a rollout that can be scored."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from strop.rollout.encode import Encoder
from strop.rollout.types import Generator, Rollout, Sampling


class Episodes(Protocol):
    """A source of rollouts. It plays whole conversations and knows neither losses nor advantages."""

    own_rewards: Sequence[str]
    """Names of rewards that episodes give themselves, which stand in `Rollout.rewards` already."""

    def roll_out(self, rows: Sequence[dict[str, Any]], numbers: Sequence[int], sampling: Sampling) -> list[Rollout]:
        """One rollout a row, in order; a row that is answered several times comes several times in succession.

        `numbers` are those of the completions in the run (`Generator.generate`): what is sampled follows from the
        sampling's seed and them. `sampling.max_tokens` bounds what comes after the prompt, tools included.
        """


class SingleTurn:
    """The plain episode: one prompt, one answer."""

    own_rewards: ClassVar[Sequence[str]] = ()

    def __init__(self, generator: Generator, encoder: Encoder):
        self.generator, self.encoder = generator, encoder

    def roll_out(self, rows: Sequence[dict[str, Any]], numbers: Sequence[int], sampling: Sampling) -> list[Rollout]:
        """One rollout a row, in order."""
        prompts = self._prompts(rows)
        completions = self.generator.generate(prompts, sampling, rows=numbers)
        if len(completions) != len(prompts):
            raise ValueError(
                f"{type(self.generator).__name__} gave {len(completions)} completions for {len(prompts)} prompts; it "
                "must give one each, in order"
            )
        return [
            Rollout.single_turn(
                row,
                prompt,
                completion,
                prompt=self.encoder.prompt_words(row),
                completion=self.encoder.words(row, completion.token_ids),
            )
            for row, prompt, completion in zip(rows, prompts, completions, strict=True)
        ]

    def _prompts(self, rows: Sequence[dict[str, Any]]) -> list[list[int]]:
        """Each row's prompt; a row that follows itself is written once."""
        prompts: list[list[int]] = []
        for i, row in enumerate(rows):
            prompts.append(prompts[-1] if i and row is rows[i - 1] else self.encoder.prompt_ids(row))
        return prompts
