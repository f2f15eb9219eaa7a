"""Who of several processes plays what, and what reward functions are given as."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from strop.rewards.from_model import RewardModel
from strop.rewards.function import unique
from strop.rewards.resolve import resolve_reward
from strop.rewards.scoring import RewardFunctions

from . import checks


class Share:
    """Which of num_prompts x group completions a process plays: whole groups where there are enough for all."""

    def __init__(self, num_prompts: int, group: int, num_processes: int, process_index: int):
        unit = group if num_prompts >= num_processes else 1
        units = num_prompts * group // unit
        bounds = [units * i // num_processes * unit for i in range(num_processes + 1)]
        self.own = range(bounds[process_index], bounds[process_index + 1])
        self.largest = max(b - a for a, b in pairwise(bounds))
        """Completions of the process that plays most."""


class EvalRounds(torch.utils.data.IterableDataset):
    """{"numbers": (n,), "rows": n rows, "counted"} for `size` rows at a time of this process.

    Every process has as many rounds; where its rows are used up they repeat one and don't count.
    """

    def __init__(self, rows: Any, size: int, num_processes: int, process_index: int):
        self.rows, self.size = rows, size
        self.num_processes, self.process_index = num_processes, process_index
        self.num_rows = len(rows) if hasattr(rows, "__len__") else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = iter(self.rows)
        start, width = 0, self.size * self.num_processes
        while block := [row for _, row in zip(range(width), rows, strict=False)]:
            first = self.process_index * self.size
            own = block[first : first + self.size]
            numbers = torch.arange(start + first, start + first + max(len(own), 1))
            yield {"numbers": numbers, "rows": own or block[:1], "counted": bool(own)}
            start += len(block)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """The states of all random generators are afterwards as before."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def reward_functions(given: Any, tokenizers: Any, args: Any) -> list[Callable[..., Any]]:
    """The functions that `given` is: one or several callables, names (`strop.rewards.resolve`) and reward models.

    `tokenizers` are those of reward models, one for each of `given` or None.
    """
    several = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    tokens = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers] * len(several)
    if len(tokens) != len(several):
        raise ValueError(
            f"reward_processing_classes has {len(tokens)} entries for {len(several)} reward_funcs; give one each, None "
            "for what needs none."
        )
    return [_function(one, tokenizer, args) for one, tokenizer in zip(several, tokens, strict=True)]


def _function(one: Any, tokenizer: Any, args: Any) -> Callable[..., Any]:
    if isinstance(one, Module):
        found: Any = RewardModel(one, tokenizer, args.per_device_train_batch_size)
    elif isinstance(one, str):
        found = resolve_reward(one)
        if isinstance(found, RewardModel) and tokenizer is not None:
            found.tokenizer = tokenizer
    else:
        found = one
    if isinstance(found, RewardModel):
        found.model.to(args.device)
    return found


def weighted_rewards(
    functions: list[Callable[..., Any]], own: Sequence[str], args: Any
) -> tuple[RewardFunctions | None, list[str], Tensor]:
    """What asks the functions, the names of all rewards, those that episodes give themselves (`own`) last, and the
    weights (F,). Refuses a run without any reward, weights that aren't as many, and an unknown name."""
    if not functions and not own:
        raise ValueError(
            "there is no reward, so there is nothing to learn; pass reward_funcs, e.g. reward_funcs=accuracy_reward"
        )
    weights = list(args.reward_weights or [1.0] * (len(functions) + len(own)))
    if len(weights) != len(functions) + len(own):
        raise ValueError(
            f"reward_weights={weights} are {len(weights)}, but there are {len(functions)} reward functions"
            + (f" and {len(own)} rewards of environments" if own else "")
            + "; give one weight each."
        )
    asked = None
    if functions:
        first = weights[: len(functions)]
        asked = RewardFunctions(functions, first, timeout=args.reward_timeout, workers=args.reward_workers)
    names = unique([*(asked.names if asked else []), *own])
    if args.dynamic_sampling_reward is not None:
        checks.one_of("dynamic_sampling_reward", args.dynamic_sampling_reward, names)
    return asked, names, torch.tensor(weights, dtype=torch.float32)
