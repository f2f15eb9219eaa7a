"""Environments: objects whose methods a model calls as tools, one a conversation, which may judge it in the end."""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from strop.compat import suggestion
from strop.rewards.function import unique
from strop.rollout.tools import Tool, Toolbox, ToolRunner, text_of_result
from strop.rollout.types import Rollout

COLUMN = "environment"
"""The column that says which of several environments a row is played in."""
NOT_TOOLS = ("reset", "get_reward")
METHODS = (FunctionType, MethodType, staticmethod, classmethod)

Factory = Callable[[], Any]


class Entered(NamedTuple):
    """An environment at the start of a conversation."""

    instance: Any
    tools: list[Tool]
    observation: str | None
    """What it said when it was reset."""


class Kind:
    """One factory's environments. `name` is their class's, which metrics call their reward by."""

    def __init__(self, factory: Factory):
        if not callable(factory):
            raise ValueError(f"environment_factory must be callable without arguments, not {factory!r}")
        probe = self._made(factory)
        self.factory = factory
        self.type = type(probe)
        self.name = self.type.__name__
        if not callable(getattr(probe, "reset", None)):
            raise ValueError(
                f"environment {self.name} has no method reset, which begins a conversation: reset(self, **row) gets "
                "the columns of the row, and returns what the model is told besides the prompt, or None"
            )
        self.tools = [Tool(getattr(probe, name)) for name in _public_methods(probe)]
        self.has_reward = callable(getattr(probe, "get_reward", None))
        self.instances = [probe]
        """They are reset, not made anew, for each conversation: what they keep open stays open."""

    @staticmethod
    def _made(factory: Factory) -> Any:
        try:
            return factory()
        except TypeError as error:
            raise ValueError(f"environment_factory {factory!r} can't be called without arguments: {error}") from error

    def instance(self, index: int) -> Any:
        while len(self.instances) <= index:
            self.instances.append(self.factory())
        return self.instances[index]


def _public_methods(environment: Any) -> list[str]:
    """Methods without an underscore, in the order they were written, those of base classes first."""
    names: dict[str, None] = {}
    for owner in reversed(type(environment).__mro__[:-1]):
        names |= dict.fromkeys(vars(owner))
    names |= dict.fromkeys(getattr(environment, "__dict__", {}))
    public = [name for name in names if not name.startswith("_") and name not in NOT_TOOLS]
    return [name for name in public if isinstance(inspect.getattr_static(environment, name), METHODS)]


class Environments:
    """The environments of a run: `factory` makes them, or a mapping of factories of which each row names one in its
    column `environment`.

    A class has a method `reset`, plain or asynchronous, that is given the row's columns; all other public methods are
    tools. What `get_reward` returns at the end, a number or None, is a reward under the class's name. Raises ValueError
    for factories and classes that aren't so.
    """

    def __init__(self, factory: Factory | Mapping[str, Factory]):
        self.is_routed = isinstance(factory, Mapping)
        given = dict(factory) if isinstance(factory, Mapping) else {"": factory}
        if not given:
            raise ValueError("environment_factory is an empty mapping; give it a factory for each name in the rows")
        self.kinds = {name: Kind(made_by) for name, made_by in given.items()}
        judges = list(dict.fromkeys(kind.type for kind in self.kinds.values() if kind.has_reward))
        names = unique([judge.__name__ for judge in judges])
        self.reward_names: dict[type, str] = dict(zip(judges, names, strict=True))

    @property
    def own_rewards(self) -> tuple[str, ...]:
        """Names of the rewards that environments give."""
        return tuple(self.reward_names.values())

    def toolboxes(self, tools: Sequence[Tool]) -> list[Toolbox]:
        """What conversations in each kind of environment have, with `tools` that all have."""
        return [Toolbox([*tools, *kind.tools]) for kind in self.kinds.values()]

    def enter(self, rows: Sequence[Mapping[str, Any]], runner: ToolRunner) -> list[Entered]:
        """An environment for each row, reset with its columns."""
        used = dict.fromkeys(self.kinds, 0)
        found: list[tuple[Kind, Any]] = []
        resets = []
        for i, row in enumerate(rows):
            name = self._name(row, i)
            instance = self.kinds[name].instance(used[name])
            used[name] += 1
            found.append((self.kinds[name], instance))
            columns = {column: value for column, value in row.items() if not (self.is_routed and column == COLUMN)}
            resets.append((instance.reset, _taken(instance.reset, columns)))
        return [
            Entered(instance, [tool.bound_to(instance) for tool in kind.tools], _observation(said, kind.name))
            for (kind, instance), said in zip(found, runner.results(resets), strict=True)
        ]

    def _name(self, row: Mapping[str, Any], index: int) -> str:
        if not self.is_routed:
            return ""
        name = row.get(COLUMN)
        if name not in self.kinds:
            raise ValueError(
                f"row {index} of the batch is for the environment {name!r} (column {COLUMN!r}), but there are "
                f"{', '.join(self.kinds)}.{suggestion(name, self.kinds)}"
            )
        return str(name)

    def judge(self, rollouts: Sequence[Rollout], runner: ToolRunner) -> None:
        """Fill in the rewards that environments give: of each class, None for conversations in another."""
        judged = []
        for rollout in rollouts:
            rollout.rewards |= dict.fromkeys(self.own_rewards)
            name = self.reward_names.get(type(rollout.columns["environments"]))
            if name is not None:
                judged.append((rollout, name))
        values = runner.results([(rollout.columns["environments"].get_reward, {}) for rollout, _ in judged])
        for (rollout, name), value in zip(judged, values, strict=True):
            rollout.rewards[name] = _reward(value, name)


def _observation(said: Any, name: str) -> str | None:
    return None if said is None else text_of_result(said, f"{name}.reset")


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `given` that the function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(given)
    names = {p.name for p in parameters}
    return {name: value for name, value in given.items() if name in names}


def _reward(value: Any, name: str) -> float | None:
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None:
        return None
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name}.get_reward returned {str(value)[:60]!r}; a reward is a finite number, or None")
    return float(value)
