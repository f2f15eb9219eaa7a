"""Reward functions by name, as on the command line and in config files."""

import ast
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strop.compat import suggestion

FUNCTIONS = {
    "accuracy": "strop.rewards.accuracy:accuracy_reward",
    "reasoning_accuracy": "strop.rewards.accuracy:reasoning_accuracy_reward",
    "think_format": "strop.rewards.formats:think_format_reward",
}
"""Name -> a reward function; "_reward" may follow the name."""
FACTORIES = {
    "soft_overlong_punishment": "strop.rewards.lengths:get_soft_overlong_punishment",
    "cosine_scaled": "strop.rewards.accuracy:get_cosine_scaled_reward",
    "repetition_penalty": "strop.rewards.lengths:get_repetition_penalty_reward",
    "regex": "strop.rewards.formats:regex_reward",
    "json": "strop.rewards.formats:json_reward",
    "xml": "strop.rewards.formats:xml_reward",
    "code": "strop.rewards.code:code_reward",
    "judge": "strop.rewards.judges:judge_reward",
}
"""Name -> what makes a reward function from options: cosine_scaled(max_len=256)."""
CHOICES = (
    f"{', '.join(FUNCTIONS)}; with options in brackets, e.g. cosine_scaled(max_len=256): {', '.join(FACTORIES)}; the "
    "import path of a function of yours, e.g. my_rewards.short; or the folder or hub id of a reward model"
)


def resolve_reward(name: str) -> Callable[..., Any]:
    """The reward function that `name` names.

        accuracy                            one of FUNCTIONS
        cosine_scaled(max_len=256)          one of FACTORIES, with its options; without brackets, with none
        my_rewards.short                    a function in a module of the working directory or of a package
        my_rewards.Short(size=3)            ... made by what is there
        out/reward, org/reward-model        a reward model

    Raises ValueError that lists the choices where it names nothing.
    """
    word, options = _parsed(name)
    plain = word.removeprefix("get_").removesuffix("_reward")
    if plain in FUNCTIONS:
        if options is not None:
            raise ValueError(f"{plain} takes no options, but here is {name!r}. Write {plain}.")
        return _imported(FUNCTIONS[plain])
    if plain in FACTORIES:
        return _made(_imported(FACTORIES[plain]), name, options or {})
    if options is None and ("/" in name or os.path.isdir(name)):
        from strop.rewards.from_model import RewardModel

        return RewardModel(name)
    found = _by_path(word, name)
    return found if options is None else _made(found, name, options)


def _parsed(name: str) -> tuple[str, dict[str, Any] | None]:
    """The word before the brackets, and the options in them; None without brackets."""
    word, bracket, _ = name.partition("(")
    if not bracket:
        return name, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # '\\d' without an r before it is what a pattern looks like
            call = ast.parse(name.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("options are written name=value")
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"the reward {name!r} can't be read ({error}). Write it like cosine_scaled(max_len=256)."
        ) from error
    return word.strip(), options


def _made(factory: Callable[..., Any], name: str, options: dict[str, Any]) -> Callable[..., Any]:
    try:
        return factory(**options)
    except TypeError as error:
        raise ValueError(f"the reward {name!r} can't be made: {error}.") from error


def _imported(place: str) -> Callable[..., Any]:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def _by_path(path: str, name: str) -> Callable[..., Any]:
    """The function at an import path; modules of the working directory count."""
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ValueError(
            f"there is no reward {name!r}.{suggestion(path, [*FUNCTIONS, *FACTORIES])} Choices: {CHOICES}."
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no reward {name!r}: no module is called {error.name}. Choices: {CHOICES}."
        ) from error
    except AttributeError as error:
        known = [name for name in dir(sys.modules[module]) if not name.startswith("_")]
        raise ValueError(
            f"there is no reward {name!r}: {module} has no {attribute!r}.{suggestion(attribute, known)} Choices: "
            f"{CHOICES}."
        ) from error
    if not callable(found):
        raise ValueError(f"the reward {name!r} is {type(found).__name__}, which can't be called.")
    return found
