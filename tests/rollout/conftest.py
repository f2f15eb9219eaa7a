"""What tests of rollouts share: a generator that writes what a test says, and remembers what it was asked."""

from collections.abc import Mapping, Sequence

import pytest

from strop.rollout.episodes_tools import TURNS
from strop.rollout.types import Completion

ScriptedReply = str | Sequence[int]


class Scripted:
    """Replies by the number of the row, one a turn; cut at the row's limit, where a reply without an end ends too.

    The n-th token of a row has the log-probability -n.
    """

    def __init__(self, tokenizer, replies: Mapping[int, Sequence[ScriptedReply]]):
        self.tokenizer, self.replies = tokenizer, replies
        self.asked: list[list[tuple[int, list[int], int]]] = []

    def sync(self, model):
        pass

    def generate(self, prompts, sampling, *, rows=None, max_tokens=None):
        limits = max_tokens or [sampling.max_tokens] * len(prompts)
        self.asked.append([(row, list(ids), limit) for row, ids, limit in zip(rows, prompts, limits, strict=True)])
        assert all(1 <= limit <= sampling.max_tokens for limit in limits)
        return [
            self._completion(self.replies[row % TURNS][row // TURNS], limit)
            for row, limit in zip(rows, limits, strict=True)
        ]

    def _completion(self, reply: ScriptedReply, limit: int) -> Completion:
        ids = self.tokenizer(reply, add_special_tokens=False).input_ids if isinstance(reply, str) else list(reply)
        ends = ids[-1] in self.tokenizer.all_special_ids or len(ids) < limit
        logps = [-float(n + 1) for n in range(len(ids))]
        return Completion(ids[:limit], logps[:limit], "stop" if len(ids) <= limit and ends else "length")


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted
