"""What rows hold besides their prompt, and batches in which completions of one prompt share it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from strop.data.collate import Batch, Example, TokenRow, collate
from strop.models.segments import Layout

MISMATCHED = "mismatched"
"""The side that is another row's completion, made by preparation."""


@dataclass(frozen=True)
class PreferenceFormat:
    """What a row holds besides its prompt."""

    sides: tuple[str, ...]
    """Columns with a completion each; tokenised, they are called <side>_ids."""
    extras: tuple[str, ...] = ()
    """Columns with a number a row, which reach the batch as tensors (E,), e.g. label; absent ones are left out."""
    ranked: bool = False
    """The only side is a list of completions, best first, as many as a row likes."""

    @property
    def columns(self) -> tuple[str, ...]:
        return ("prompt_ids", *(f"{side}_ids" for side in self.sides))

    @property
    def written(self) -> tuple[str, ...]:
        """The sides that rows bring themselves."""
        return tuple(side for side in self.sides if side != MISMATCHED)


PAIRS = PreferenceFormat(("chosen", "rejected"))
PAIRS_WITH_MARGIN = PreferenceFormat(("chosen", "rejected"), ("margin",))
TRIPLES = PreferenceFormat(("chosen", "rejected", "reference"))
LABELLED = PreferenceFormat(("completion",), ("label",))
LABELLED_MISMATCHED = PreferenceFormat(("completion", MISMATCHED), ("label",))
RANKED = PreferenceFormat(("completions",), ranked=True)


@dataclass
class PreferenceCollator:
    """Examples of a format to a batch with one row a side: chosen, rejected, chosen, rejected, ...

    The prompt is the parent of its sides. Of ranked examples each completion is a row, and `examples` tells how many
    belong together. `ref_<side>_logps`, one number a token, become the stream ref_logps.
    """

    pad_token_id: int
    layout: Layout = "packed"
    wanted: PreferenceFormat = PAIRS
    multiple_of: int = 1

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        rows: list[TokenRow] = []
        sizes: list[Example] = []
        for example in examples:
            before = len(rows)
            prompt = before if example["prompt_ids"] else -1
            if example["prompt_ids"]:
                rows.append(TokenRow(example["prompt_ids"], None))
            for ids, logps in self._completions(example):
                rows.append(TokenRow(ids, ids, prompt, {} if logps is None else {"ref_logps": logps}))
            num_rows = len(rows) - before - (prompt >= 0)
            sizes.append(Example(num_rows, sum(len(row.input_ids) for row in rows[before:])))
        batch = collate(rows, self.layout, self.pad_token_id, self.multiple_of)
        extras = {
            name: torch.tensor([example[name] for example in examples])
            for name in self.wanted.extras
            if examples[0].get(name) is not None
        }
        return batch | extras | {"examples": sizes}

    def _completions(self, example: dict[str, Any]) -> Iterator[tuple[list[int], list[float] | None]]:
        """The ids of each completion, and what the reference says of its tokens."""
        for side in self.wanted.sides:
            ids, logps = example[f"{side}_ids"], example.get(f"ref_{side}_logps")
            if self.wanted.ranked:
                yield from zip(ids, logps or [None] * len(ids), strict=True)
            else:
                yield ids, logps
