"""Experiences to a batch: the prompt of a group stands in it once, as the parent of its completions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strop.data.collate import IGNORE, Batch, Example, TokenRow, collate, keep_examples
from strop.models.segments import Layout
from strop.rollout.buffer import Experience

STREAMS = ("old_logps", "ref_logps", "sampling_logps", "advantages", "returns", "old_values")
COLUMNS = {"advantages": "advantage", "kl_weights": "kl_weight"}
"""What a batch calls the numbers of its rows, and an experience its own."""


@dataclass
class RolloutCollator:
    """A batch with one row an experience, of its tokens after the prompt.

    Those of `STREAMS` that the experiences have are (B, T); `COLUMNS` are (B, 1), unless there is a stream of the name.
    Without any experience: a batch of two tokens that trains nothing.
    """

    pad_token_id: int
    layout: Layout = "packed"
    multiple_of: int = 1

    def __call__(self, experiences: Sequence[Experience]) -> Batch:
        written = [one for one in experiences if len(one.token_ids) > one.prompt_length]
        if not written:
            return self._nothing([name for name in STREAMS if experiences and getattr(experiences[0], name)])
        rows: list[TokenRow] = []
        parents: dict[tuple[int, ...], int] = {(): -1}
        sizes = []
        for one in written:
            prompt = tuple(one.token_ids[: one.prompt_length])
            shared = prompt in parents
            if not shared:
                parents[prompt] = len(rows)
                rows.append(TokenRow(prompt, None))
            rows.append(_row(one, parents[prompt]))
            sizes.append(Example(1, len(one.token_ids) - (one.prompt_length if shared else 0)))
        batch = collate(rows, self.layout, self.pad_token_id, self.multiple_of)
        columns = {
            name: torch.tensor([[getattr(one, field)] for one in written], dtype=torch.float32)
            for name, field in COLUMNS.items()
        }
        return columns | batch | {"examples": sizes}

    def _nothing(self, streams: Sequence[str]) -> Batch:
        pad = self.pad_token_id
        row = TokenRow([pad, pad], [IGNORE, pad], -1, {name: [0.0, 0.0] for name in streams})
        batch = collate([row], self.layout, pad, self.multiple_of)
        columns = {name: torch.zeros(1, 1) for name in COLUMNS}
        return keep_examples(columns | batch | {"examples": [Example(1, 2)]}, 0)


def _row(one: Experience, parent: int) -> TokenRow:
    own = slice(one.prompt_length, None)
    ids = one.token_ids[own]
    labels = [token if trained else IGNORE for token, trained in zip(ids, one.completion_mask[own], strict=True)]
    streams = {name: getattr(one, name)[own] for name in STREAMS if getattr(one, name) is not None}
    return TokenRow(ids, labels, parent, streams)
