"""Reward functions asked side by side about the same completions."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from strop.rewards.function import GIVEN, HIDDEN, RewardFunction, unique
from strop.rewards.limits import Loop, Threads, within, without_exit
from strop.rewards.resolve import resolve_reward
from strop.rewards.texts import Words

Reward: TypeAlias = Callable[..., Any] | nn.Module | str | Path
"""What reward functions may be given as."""

logger = logging.getLogger(__name__)

SEARCH_SECONDS = 2.0
"""How long the row is looked for that made a function fail."""
LANES = 64
"""Rows that a function is asked about at the same time once it was too slow for all of them together."""


@dataclass
class Scores:
    """What functions say of N completions."""

    values: Tensor
    """(N, F), float32 on the CPU; NaN where a function doesn't apply to a row."""
    names: list[str]
    seconds: dict[str, float]
    """How long each function took, by name."""
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """What functions gave to `log_extra`: N values each."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """What functions gave to `log_metric`."""

    def total(self, weights: Tensor) -> Tensor:
        """(N,): the weighted sum over the functions that apply; NaN for rows to which none does."""
        return (self.values * weights).nansum(1).where(self.covered, math.nan)

    @property
    def covered(self) -> Tensor:
        """(N,): is there a function that applies to the row."""
        return ~self.values.isnan().all(1)


@dataclass
class Rows:
    """Completions with all that functions may ask for, by name; `numbers` are the rows' own."""

    given: Mapping[str, Sequence[Any]]
    shared: Mapping[str, Any]
    numbers: Sequence[int]

    def one(self, index: int) -> "Rows":
        return Rows({name: values[index : index + 1] for name, values in self.given.items()}, self.shared, [index])


class RewardFunctions:
    """Reward functions with their weights; `score` asks all of them.

    `functions` is one or several of these: a callable `f(prompts=..., completions=..., completion_ids=..., **columns)`
    that returns a number for each completion, or None where it doesn't apply; a name that `resolve_reward` knows; a
    reward model, as an object, a folder or a hub id, whose own tokenizer `tokenizers` may hold in the same place.
    Asynchronous ones run together on one event loop; others one after the other in the caller's thread, or, with
    `workers`, side by side in so many threads.

    `timeout` bounds each function in seconds (in threads, then). A function whose time is over is asked again row by
    row, side by side, for as long at most; rows without an answer by then count as not applicable, with a warning that
    names them. A function that raises ends the scoring: the ValueError names it and, where asking row by row finds it,
    the row.

    Names are unique, the second `f` being `f_2`. Raises ValueError for no function, for weights that aren't one finite
    number each, and for what can't be called.
    """

    def __init__(
        self,
        functions: Reward | Sequence[Reward],
        weights: Sequence[float] | None = None,
        *,
        tokenizers: Any | Sequence[Any] = None,
        timeout: float | None = None,
        workers: int = 0,
    ):
        given = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if not given:
            raise ValueError("there is no reward function, so there is nothing to learn; pass at least one.")
        if workers < 0 or (timeout is not None and timeout <= 0):
            raise ValueError(f"workers={workers} must be 0 or more, timeout={timeout} above 0 or None.")
        cutters = [None] * len(given) if tokenizers is None else tokenizers
        cutters = list(cutters) if isinstance(cutters, (list, tuple)) else [cutters]
        if len(cutters) != len(given):
            raise ValueError(f"there are {len(cutters)} tokenizers for {len(given)} reward functions; None is one too.")
        self.functions = [RewardFunction(as_function(*pair)) for pair in zip(given, cutters, strict=True)]
        for function, name in zip(self.functions, unique([f.name for f in self.functions]), strict=True):
            function.name = name
        self.weights = _weights(weights, self.names)
        self.timeout, self.workers = timeout, workers

    def to(self, device: torch.device | str) -> "RewardFunctions":
        """These functions, with their reward models on `device`."""
        for function in self.functions:
            if isinstance(model := getattr(function.function, "model", None), nn.Module):
                model.to(device)
        return self

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions]

    def check(self, columns: Sequence[str], has_ids: bool = True) -> None:
        """Raises ValueError if rows with these columns can't be scored: before the first completion is written."""
        taken = [name for name in columns if name in GIVEN and name != "completion_ids"]
        if taken:
            raise ValueError(
                f"the column {taken[0]!r} has the name of something else that reward functions are given; rename it."
            )
        for function in self.functions:
            function.check(columns, has_ids)

    def score(
        self,
        prompts: Sequence[Words],
        completions: Sequence[Words],
        completion_ids: Sequence[Sequence[int]] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        trainer_state: Any = None,
    ) -> Scores:
        """What each function says of each of the N completions; all sequences have N elements."""
        columns = {name: values for name, values in (columns or {}).items() if name not in HIDDEN}
        columns.pop("completion_ids", None)
        self.check(list(columns), completion_ids is not None)
        given = {"prompts": prompts, "completions": completions, **columns}
        given |= {} if completion_ids is None else {"completion_ids": completion_ids}
        size = len(completions)
        for name, values in given.items():
            if len(values) != size:
                raise ValueError(f"there are {size} completions but {len(values)} {name}; there must be one each.")
        given = {name: list(values) for name, values in given.items()}
        rows = Rows(given, {"trainer_state": trainer_state}, range(size))
        scores = Scores(torch.full((size, len(self.functions)), math.nan), self.names, {})
        if size:
            self._fill(scores, rows)
        return scores

    def _fill(self, scores: Scores, rows: Rows) -> None:
        calls = [Call(function, self, scores, rows) for function in self.functions]
        waiting: dict[Call, Future[Tensor]] = {}
        try:
            for call in calls:
                if call.function.is_async:
                    waiting[call] = self.loop.submit(call.answer_async())
                elif self._in_threads:
                    waiting[call] = self.threads.submit(call.answer)
            answers = {call: call.answer() for call in calls if call not in waiting} | self._results(waiting)
        except BaseException:
            for future in waiting.values():
                future.cancel()
            raise
        for index, call in enumerate(calls):
            scores.values[:, index] = answers[call]

    def _results(self, waiting: "Mapping[Call, Future[Tensor]]") -> "dict[Call, Tensor]":
        """What calls in the background say, as soon as all have answered or one has failed. They bound their own time,
        unless one never gives the event loop back."""
        limit = 2 * self.timeout + 1 if self.timeout and any(call.function.is_async for call in waiting) else None
        done, late = wait(waiting.values(), limit, FIRST_EXCEPTION)
        failed = any(future.exception() for future in done)
        for call, future in waiting.items():
            if future in late and call.function.is_async and not failed:
                raise ValueError(
                    f"reward function {call.function.name} could not be stopped after {limit:g} s: it is asynchronous, "
                    "but something blocks the event loop. Await what takes long, or make it a plain function."
                )
        return {call: future.result() for call, future in waiting.items() if not failed or future in done}

    @property
    def _in_threads(self) -> bool:
        return self.workers > 0 or self.timeout is not None

    @cached_property
    def threads(self) -> "Threads":
        return Threads(max(self.workers, 1))

    @cached_property
    def loop(self) -> "Loop":
        return Loop()


def as_function(reward: Reward, tokenizer: Any = None) -> Callable[..., Any]:
    """The callable that `reward` is or names. Raises ValueError for a tokenizer beside what cuts no text."""
    if isinstance(reward, nn.Module) or (tokenizer is not None and isinstance(reward, (str, Path))):
        from strop.rewards.from_model import RewardModel

        return RewardModel(reward, tokenizer)
    if isinstance(reward, (str, Path)):
        return resolve_reward(str(reward))
    if tokenizer is not None:
        raise ValueError(f"there is a tokenizer for {reward!r}, which is no reward model; its place must hold None.")
    return reward


def _weights(weights: Sequence[float] | None, names: Sequence[str]) -> Tensor:
    values = [1.0] * len(names) if weights is None else [float(weight) for weight in weights]
    if len(values) != len(names):
        raise ValueError(f"there are {len(values)} weights for {len(names)} reward functions ({', '.join(names)}).")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"weights={values} of the reward functions must be finite numbers.")
    return torch.tensor(values, dtype=torch.float32)


NO_LOGS: dict[str, Callable[[str, Any], None]] = {
    "log_extra": lambda column, values: None,
    "log_metric": lambda name, value: None,
}
"""For functions that are asked a second time about single rows."""


@dataclass(eq=False)
class Call:
    """One function asked about the rows of one batch."""

    function: RewardFunction
    owner: RewardFunctions
    scores: Scores
    rows: Rows

    @property
    def timeout(self) -> float | None:
        return self.owner.timeout

    def answer(self) -> Tensor:
        """(N,): what a synchronous function says."""
        with self.timed():
            if self.timeout is None:
                return self.read(self.invoke(self.rows), self.rows)
            with contextlib.suppress(TimeoutError):
                return self.read(within(partial(self.invoke, self.rows), self.timeout), self.rows)
            deadline = time.monotonic() + self.timeout
            numbers = self.rows.numbers
            with ThreadPoolExecutor(min(len(numbers), LANES)) as lanes:
                return self.put_together(list(lanes.map(partial(self.alone, deadline), numbers)))

    def alone(self, deadline: float, row: int) -> Tensor | None:
        one, left = self.rows.one(row), deadline - time.monotonic()
        with contextlib.suppress(TimeoutError):
            return self.read(within(partial(self.invoke, one), left), one) if left > 0 else None
        return None

    def invoke(self, rows: Rows) -> Any:
        try:
            return self.called(rows)
        except (Exception, SystemExit) as error:
            found = self.culprit(error) if len(rows.numbers) > 1 else (rows.numbers[0], error)
            raise self.explained(error, *found) from error

    def called(self, rows: Rows) -> Any:
        """What the function returns; a generator runs to its end, so that its failures are the function's."""
        returned = self.function.function(**self.arguments(rows))
        return list(returned) if isinstance(returned, Iterator) else returned

    async def answer_async(self) -> Tensor:
        """(N,): what an asynchronous function says."""
        with self.timed():
            with contextlib.suppress(TimeoutError):
                return self.read(await asyncio.wait_for(self.awaited(self.rows), self.timeout), self.rows)
            return self.put_together(await asyncio.gather(*map(self.alone_async, self.rows.numbers)))

    async def alone_async(self, row: int) -> Tensor | None:
        one = self.rows.one(row)
        with contextlib.suppress(TimeoutError):
            return self.read(await asyncio.wait_for(self.awaited(one), self.timeout), one)
        return None

    async def awaited(self, rows: Rows) -> Any:
        try:
            return await without_exit(self.function.function(**self.arguments(rows)))
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise self.explained(RuntimeError("it was cancelled, but not by its timeout"), None, None) from error
        except Exception as error:
            found = await self.culprit_async(error) if len(rows.numbers) > 1 else (rows.numbers[0], error)
            raise self.explained(error, *found) from error

    def arguments(self, rows: Rows) -> dict[str, Any]:
        logs = {"log_extra": self.log_extra, "log_metric": self.log_metric} if rows is self.rows else NO_LOGS
        own = {name: list(values) for name, values in rows.given.items()}  # what one does to them is not others' affair
        return self.function.arguments({**own, **rows.shared, **logs})

    def read(self, returned: Any, rows: Rows) -> Tensor:
        return self.function.rewards(returned, len(rows.numbers), rows.numbers)

    def put_together(self, parts: Sequence[Tensor | None]) -> Tensor:
        """The rows' answers as one; those that didn't come in time are NaN."""
        late = [row for row, part in zip(self.rows.numbers, parts, strict=True) if part is None]
        shown = ", ".join(map(str, late[:10])) + (", ..." if len(late) > 10 else "")
        logger.warning(
            f"reward function {self.function.name} took longer than {self.timeout:g} s; asked row by row, it gave no "
            f"answer for {len(late)} of {len(parts)} rows{f' ({shown})' if late else ''}, which count as not applicable"
        )
        return torch.cat([torch.full((1,), math.nan) if part is None else part for part in parts])

    def explained(self, error: BaseException, row: int | None, why: BaseException | None) -> ValueError:
        """`error` with the function's name, and the row that fails alone as well if there is one."""
        shown = f"{type(why or error).__name__}: {why or error}"
        if row is None:
            return ValueError(
                f"reward function {self.function.name} failed on {len(self.rows.numbers)} rows, but on no single one "
                f"that was tried: {shown}"
            )
        completion = repr(self.rows.given["completions"][row])[:200]
        return ValueError(f"reward function {self.function.name} failed on row {row} ({completion}): {shown}")

    def culprit(self, failure: BaseException) -> tuple[int | None, BaseException | None]:
        """The first row that fails alone as well, in the same way, and the error then; none where that is not found
        within SEARCH_SECONDS."""
        deadline = time.monotonic() + SEARCH_SECONDS
        for row in self.rows.numbers:
            if time.monotonic() > deadline:
                break
            try:
                self.called(self.rows.one(row))
            except (Exception, SystemExit) as error:
                if type(error) is type(failure):
                    return row, error
        return None, None

    async def culprit_async(self, failure: Exception) -> tuple[int | None, Exception | None]:
        """`culprit` of an asynchronous function, which is asked about all rows at once."""

        async def ask(row: int) -> None:
            asked = self.function.function(**self.arguments(self.rows.one(row)))
            await asyncio.wait_for(without_exit(asked), SEARCH_SECONDS)

        found = await asyncio.gather(*map(ask, self.rows.numbers), return_exceptions=True)
        failed = zip(self.rows.numbers, found, strict=True)
        return next(((row, error) for row, error in failed if type(error) is type(failure)), (None, None))

    @contextlib.contextmanager
    def timed(self):
        began = time.monotonic()
        try:
            yield
        finally:
            self.scores.seconds[self.function.name] = time.monotonic() - began

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep a column of the batch. Raises ValueError if it has not a value for each completion."""
        values = list(values)
        if len(values) != len(self.rows.numbers):
            raise ValueError(
                f"log_extra({column!r}) got {len(values)} values for {len(self.rows.numbers)} completions."
            )
        self.scores.columns[column] = values

    def log_metric(self, name: str, value: float) -> None:
        """Keep a number. Raises ValueError for what is none."""
        self.scores.metrics.setdefault(name, []).append(float(value))
