"""Config files: one YAML mapping of option names to values, each remembered with its line."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

NO_LEVELS: Mapping[str, int] = {}
FLOAT = r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"


class Yaml12Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `1e-4` is a number, and `no`, `on` or `yes` are words."""


Yaml12Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _resolve(tag: str, pattern: str, first: str) -> None:
    Yaml12Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_resolve("bool", "^(true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve("float", FLOAT + r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$", "-+0123456789.")


@dataclass(frozen=True)
class Setting:
    """A value and where it was said: "command line" or "file:line"."""

    value: Any
    origin: str


def read_config(path: str | Path, levels: Mapping[str, int] = NO_LEVELS) -> dict[str, Setting]:
    """The settings in a config file. Raises ValueError, with file and line, for what is no such mapping.

    `levels` says how deep below a key what is written there are settings, each with its line, and not one value.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no config file {str(path)!r} (working directory: {os.getcwd()}).")
    loader = Yaml12Loader(path.read_text())
    try:
        return _settings(loader, loader.get_single_node(), str(path), levels)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}:{line}: not YAML: {error.problem}.") from None
    finally:
        loader.dispose()


def read_value(text: str) -> Any:
    """What `text` is as a value in a config file. Raises ValueError for what is no YAML."""
    try:
        return yaml.load(text, Yaml12Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is no value in YAML; put quotes around what is a text.") from error


def _settings(loader: Yaml12Loader, root: yaml.Node | None, path: str, levels: Mapping[str, int]) -> dict[str, Setting]:
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}:{root.start_mark.line + 1}: a config file is a mapping, one `name: value` a line.")
    settings: dict[str, Setting] = {}
    for key_node, value_node in root.value:
        key, origin = str(loader.construct_object(key_node)), f"{path}:{key_node.start_mark.line + 1}"
        if key in settings:
            raise ValueError(f"{origin}: {key} was given before, at {settings[key].origin}; keep one of them.")
        depth = levels.get(key, levels.get("*", 0))
        if depth and isinstance(value_node, yaml.MappingNode):
            settings[key] = Setting(_settings(loader, value_node, path, {"*": depth - 1}), origin)
        else:
            settings[key] = Setting(loader.construct_object(value_node, deep=True), origin)
    return settings


def apply_environment(settings: dict[str, Setting]) -> dict[str, Setting]:
    """`settings` without `env`, whose variables are set for this process and its children."""
    env = settings.get("env")
    if env is None:
        return settings
    if not isinstance(env.value, dict):
        raise ValueError(f"{env.origin}: env={env.value!r} must be a mapping of environment variables to values.")
    os.environ.update({str(name): _text(value) for name, value in env.value.items()})
    return {name: setting for name, setting in settings.items() if name != "env"}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
