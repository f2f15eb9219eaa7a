"""The contract of a reward function: what it is called, what it is given, and what it may give back."""

import contextlib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.compat import suggestion

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What every function may ask for besides the columns of the rows."""
LARGEST = torch.finfo(torch.float32).max
"""Beyond it there is only infinity."""
HIDDEN = ("prompt", "completion")
"""Columns that functions get as `prompts` and `completions`, not by their own name."""


class RewardFunction:
    """A callable under its name, which is given only what it takes: all it knows how to name, or everything if it
    takes `**kwargs`. It may be a coroutine function, or have an asynchronous `__call__`.

    A callable may have a method `check`, without arguments, that raises ValueError where it can't work. Raises
    ValueError for what can't be called, and for parameters that have no name.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None):
        if not callable(function):
            raise ValueError(f"a reward function is called with completions, but {function!r} can't be called.")
        self.function = function
        self.name = name or name_of(function)
        self.is_async = _is_async(function)
        parameters = _parameters(function, self.name)
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        unnamed = [p.name for p in named if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if unnamed:
            raise ValueError(
                f"reward function {self.name} takes {unnamed[0]} by position, but is given everything by name."
            )
        self.names = {p.name for p in named}
        self.required = [p.name for p in named if p.default is p.empty]

    def check(self, columns: Iterable[str], has_ids: bool = True) -> None:
        """Raises ValueError if rows with these columns lack what the function needs, or if it says it can't work."""
        known = [*GIVEN, *(name for name in columns if name not in HIDDEN)]
        if not has_ids:
            known.remove("completion_ids")
        for name in self.required:
            if name not in known:
                why = " (there is no tokenizer here)" if name == "completion_ids" else ""
                raise ValueError(
                    f"reward function {self.name} needs {name!r}, which the rows lack{why}. They have "
                    f"{', '.join(known)}.{suggestion(name, known)}"
                )
        if callable(check := getattr(_unwrapped(self.function), "check", None)):
            check()

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The part of `given` that the function takes."""
        return dict(given) if self.takes_all else {name: given[name] for name in given if name in self.names}

    def rewards(self, returned: Any, size: int, rows: Sequence[int] | None = None) -> Tensor:
        """(size,): what was returned, in float32, NaN where it was None.

        A list, tuple, generator, array or tensor, (size,) or (size, 1), of numbers, booleans and None. Raises
        ValueError, with the function's name and the row (`rows` numbers them), for anything else: a wrong length, text,
        NaN, infinity.
        """
        values = self._listed(returned)
        if len(values) != size:
            raise ValueError(
                f"reward function {self.name} returned {len(values)} values for {size} completions; it must return one "
                "each, None where it doesn't apply."
            )
        found = [self._number(value, rows[i] if rows else i) for i, value in enumerate(values)]
        return torch.tensor(found, dtype=torch.float32)

    def _listed(self, returned: Any) -> list[Any]:
        returned = returned.tolist() if hasattr(returned, "tolist") else returned  # tensors and arrays
        if not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, Mapping, set, frozenset)):
            shown = "None" if returned is None else f"{type(returned).__name__} {str(returned)[:60]!r}"
            raise ValueError(
                f"reward function {self.name} returned {shown}; it must return a list with a number or None for each "
                "completion."
            )
        return list(returned)

    def _number(self, value: Any, row: int) -> float:
        value = value.tolist() if hasattr(value, "tolist") else value
        while isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if value is None:
            return math.nan
        number = None
        with contextlib.suppress(OverflowError):
            number = float(value) if isinstance(value, numbers.Real) else None
        if number is None or not abs(number) <= LARGEST:
            raise ValueError(
                f"reward function {self.name} returned {str(value)[:60]!r} for row {row}; a reward is a finite number, "
                "or None where the function doesn't apply."
            )
        return number


def name_of(function: Callable[..., Any]) -> str:
    """What metrics call a function: its own name, that of what a partial wraps, or else its class."""
    function = _unwrapped(function)
    return getattr(function, "__name__", type(function).__name__)


def unique(names: Sequence[str]) -> list[str]:
    """`names`, of which the second and later of equals get a number: f, f_2, f_3."""
    taken: list[str] = []
    for name in names:
        candidates = [name, *(f"{name}_{number}" for number in range(2, len(names) + 2))]
        taken.append(next(candidate for candidate in candidates if candidate not in taken))
    return taken


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_async(function: Any) -> bool:
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward function {name} doesn't tell its parameters ({error}); wrap it in a function of your own."
        ) from error
