"""Episodes played by a function of the user's: `rollout_func(prompts, trainer)`."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from strop.compat import suggestion
from strop.rollout.encode import Encoder
from strop.rollout.types import Rollout, Sampling

logger = logging.getLogger(__name__)

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
MASK = "env_mask"

RolloutFunction = Callable[[list[Any], Any], Mapping[str, Any]]


class FunctionEpisodes:
    """Rollouts that `function(prompts, trainer)` returns: a mapping of `prompt_ids`, `completion_ids` and `logprobs`,
    a list each for every prompt, and, as it likes, `env_mask` (0 on tokens of a completion that the policy didn't
    write) and columns for reward functions, a value each or one for all.

    Without log-probabilities (None, of all, of a row or of a token) those of the rollouts are NaN: what sampled them
    isn't known, which is warned of once. Raises ValueError for what is missing, too short or too long, with the row.
    """

    own_rewards: Sequence[str] = ()

    def __init__(self, function: RolloutFunction, trainer: Any, encoder: Encoder, end_ids: Collection[int]):
        if not callable(function):
            raise ValueError(f"rollout_func={function!r} can't be called; it is a function of prompts and the trainer")
        self.function, self.trainer, self.encoder, self.end_ids = function, trainer, encoder, end_ids
        self.has_unknown = False
        """Whether tokens without log-probabilities were seen."""

    def roll_out(self, rows: Sequence[dict[str, Any]], numbers: Sequence[int], sampling: Sampling) -> list[Rollout]:
        """One rollout a row, in order."""
        returned = self.function([row["prompt"] for row in rows], self.trainer)
        if not isinstance(returned, Mapping):
            raise ValueError(f"rollout_func returned {type(returned).__name__}; it returns a mapping with {REQUIRED}")
        missing = [name for name in REQUIRED if name not in returned]
        if missing:
            raise ValueError(
                f"rollout_func returned {', '.join(map(str, returned))}, but not {missing[0]}; logprobs may be None."
                f"{suggestion(missing[0], map(str, returned))}"
            )
        given = {name: _per_row(name, value, len(rows)) for name, value in returned.items()}
        rollouts = [
            self._rollout(i, row, {name: values[i] for name, values in given.items()}) for i, row in enumerate(rows)
        ]
        unknown = sum(math.isnan(logp) for rollout in rollouts for logp in rollout.logps)
        if unknown and not self.has_unknown:
            self.has_unknown = True
            logger.warning(
                "rollout_func returned no logprobs for %d of the %d tokens written: they count as sampled by the model "
                "in training, and nothing is corrected for them. If another program has sampled, return what it says",
                unknown, sum(rollout.length for rollout in rollouts),
            )  # fmt: skip
        return rollouts

    def _rollout(self, index: int, row: dict[str, Any], given: dict[str, Any]) -> Rollout:
        prompt, written = (_numbers(name, given.pop(name), index, int, 0) for name in REQUIRED[:2])
        logps, mask = given.pop("logprobs"), given.pop(MASK, None)
        mask = [1] * len(written) if mask is None else _numbers(MASK, mask, index, int, 0, 1)
        logps = [None] * len(mask) if logps is None else logps
        logps = _numbers("logprobs", [math.nan if logp is None else logp for logp in logps], index, float)
        for name, values in ((MASK, mask), ("logprobs", logps)):
            if len(values) != len(written):
                raise ValueError(
                    f"rollout_func returned {len(written)} completion_ids but {len(values)} {name} for row {index} of "
                    "the batch; there must be one a token"
                )
        if not prompt:
            raise ValueError(f"rollout_func returned no prompt_ids for row {index} of the batch; what was answered?")
        before = [0.0] * len(prompt)
        return Rollout(
            row=row,
            token_ids=prompt + written,
            completion_mask=[0] * len(prompt) + mask,
            logps=before + [logp if bit else 0.0 for logp, bit in zip(logps, mask, strict=True)],
            finish_reason="stop" if written and written[-1] in self.end_ids else "length",
            prompt_length=len(prompt),
            prompt=row["prompt"],
            completion=self.encoder.words(row, written),
            columns=given,
        )


def _numbers(name: str, values: Any, index: int, kind: type, least: float = -math.inf, most: float = math.inf) -> list:
    """`values` as numbers of a kind. Raises ValueError, with the row, for what is none, or out of range."""
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    for value in values:
        number = value.item() if hasattr(value, "item") else value
        fits = isinstance(number, int | float) and (kind is float or float(number).is_integer())
        if not fits or not (math.isnan(number) or least <= number <= most):
            what = {"logprobs": "numbers", MASK: "0 and 1"}.get(name, "ids of tokens")
            raise ValueError(
                f"rollout_func returned {name} with {str(number)[:40]!r} for row {index} of the batch; they are {what}"
            )
    return [kind(value) for value in values]


def _per_row(name: str, value: Any, size: int) -> list[Any]:
    """A value for each row; what is no list is the same for all."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        if name in REQUIRED[:2]:
            raise ValueError(f"rollout_func returned {type(value).__name__} as {name}; it is a list of ids a prompt")
        return [value] * size
    if len(value) != size:
        raise ValueError(f"rollout_func returned {len(value)} {name} for {size} prompts; there must be one each")
    return list(value)
