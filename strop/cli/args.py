"""Options of a command from dataclasses, a config file and the command line.

Types, conversion and help come from jsonargparse. What is decided here: which source wins (command line, then file,
then default, by presence and not by value), the spellings that are accepted, and what an error says.
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import jsonargparse

from strop.cli.fields import Option, options_of
from strop.cli.yaml_config import Setting
from strop.compat import OLD_NAMES, renamed, suggestion


class Options:
    """The options of a command, grouped by owner.

    `aliases` are other names of an option, e.g. {"data": "dataset_name"}. Old names of the classes are accepted
    too; their constructors translate them.
    """

    def __init__(self, prog: str, classes: Sequence[type], usage: str = "", aliases: Mapping[str, str] | None = None):
        self.classes, self.aliases, self.prog = list(classes), dict(aliases or {}), prog
        self.options = options_of(*classes)
        self.old = {name for cls in classes for name in OLD_NAMES.get(cls.__name__, {})} - self.options.keys()
        self.parser = jsonargparse.ArgumentParser(
            prog=prog,
            usage=usage or f"{prog} [--config FILE] [options]",
            exit_on_error=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=HelpFormatter,
        )
        self._add_options()

    def _add_options(self) -> None:
        groups: dict[type, Any] = {}
        spellings = {name: [alias for alias, to in self.aliases.items() if to == name] for name in self.options}
        for name, option in sorted(self.options.items(), key=lambda item: self._rank(item[1].owner)):
            if option.owner not in groups:
                groups[option.owner] = self.parser.add_argument_group(option.owner.__name__, _summary(option.owner))
            flags = [f"--{spelling}" for spelling in (name, *spellings[name])]
            groups[option.owner].add_argument(*flags, dest=name, **_how(option))
        for name in sorted(self.old):
            self.parser.add_argument(f"--{name}", type=Any, nargs="?", const=True, help=argparse.SUPPRESS)

    def _rank(self, owner: type) -> int:
        """Owners in the order of the classes they belong to; within one, the most specific first."""
        order = [base for cls in self.classes for base in cls.__mro__]
        return order.index(owner)

    @property
    def names(self) -> list[str]:
        return [*self.options, *self.aliases]

    def read(self, argv: Sequence[str], file: Mapping[str, Setting] | None = None) -> dict[str, Setting]:
        """What was said, by option name. Raises ValueError for unknown names and for values of the wrong type."""
        known, unknown = self.split(argv)
        if unknown:
            raise ValueError(self._unknown(unknown))
        return self._renamed(self.read_file(file or {})) | self._renamed(self._read_line(known))

    def _renamed(self, settings: dict[str, Setting]) -> dict[str, Setting]:
        """`settings` with old names replaced, so that a file's new name and the line's old one are one option."""
        current = {name: setting for name, setting in settings.items() if name not in self.old}
        for name in settings.keys() - current.keys():
            new, value = renamed(self._table(name), name, settings[name].value)
            if new in current:
                raise ValueError(f"{settings[name].origin}: {name} is the old name of {new}, which is given too.")
            current[new] = Setting(value, settings[name].origin)
        return current

    def _table(self, old: str) -> str:
        return next(cls.__name__ for cls in self.classes if old in OLD_NAMES.get(cls.__name__, {}))

    def split(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Words of the command line that belong to known options, spelt as these are, and the others."""
        known: list[str] = []
        unknown: list[str] = []
        option: Option | None = None
        target = unknown
        for word in argv:
            if re.match(r"--[A-Za-z]", word) or word == "-h":
                name, equals, value = word.partition("=")
                name = name if word == "-h" else "--" + name[2:].replace("-", "_")
                is_known = name[2:] in {*self.names, *self.old, "help"} or word == "-h"
                target = known if is_known else unknown
                option = self.options.get(self.aliases.get(name[2:], name[2:]))
                target.append(name + equals + (option.spelt(value) if option else value) if is_known else word)
            else:
                target.append(option.spelt(word) if option else word)
        return known, unknown

    def _read_line(self, argv: list[str]) -> dict[str, Setting]:
        try:
            said = vars(self.parser.parse_args(argv))
        except argparse.ArgumentError as error:
            raise ValueError(self._explained(str(error))) from None
        return {name: Setting(self._collapsed(name, value), "command line") for name, value in said.items()}

    def read_file(self, file: Mapping[str, Setting]) -> dict[str, Setting]:
        """The settings of a config file with the values converted to the options' types."""
        settings = {}
        for key, setting in file.items():
            name = self.aliases.get(key, key)
            if name not in self.options and name not in self.old:
                raise ValueError(f"{setting.origin}: unknown option {key!r}.{suggestion(key, self.names)}")
            settings[name] = Setting(self._converted(name, setting), setting.origin)
        return settings

    def _converted(self, name: str, setting: Setting) -> Any:
        option, value = self.options.get(name), setting.value
        if option is None or value is None:
            return value
        if option.is_list and not isinstance(value, list):
            value = [value]
        if isinstance(value, str):
            value = option.spelt(value)
        try:
            return self._collapsed(name, self.parser.parse_object({name: value}, defaults=False)[name])
        except argparse.ArgumentError as error:
            raise ValueError(f"{setting.origin}: {self._explained(str(error))}") from None

    def _collapsed(self, name: str, value: Any) -> Any:
        """A list of one where the option takes a single text as well: that text."""
        option = self.options.get(name)
        if option and option.is_list and option.default is not None and not isinstance(option.default, list):
            return value[0] if isinstance(value, list) and len(value) == 1 else value
        return value

    def _unknown(self, words: list[str]) -> str:
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        if not flags:
            return f"{words[0]!r} is not an option; options are written as --name value."
        known = [f"--{name}" for name in self.names]
        hints = [suggestion("--" + flag[2:].replace("-", "_"), known) for flag in flags]
        return " ".join(f"unknown option {flag}.{hint}" for flag, hint in zip(flags, hints, strict=True))

    def _explained(self, message: str) -> str:
        """jsonargparse's message for a bad value as one line: option, value, and what it takes."""
        key = re.search(r'Parser key "(\w+)"', message)
        value = re.search(r"(?:Given value|Got value): (.*)", message)
        if not key or not value or key[1] not in self.options:
            return " ".join(message.split())
        return f"{key[1]}={value[1]} is not what it takes: {self.options[key[1]].kind_names}."

    def build(self, settings: Mapping[str, Setting]) -> list[Any]:
        """An instance of each class; what is not in `settings` keeps its default."""
        missing = [name for name, option in self.options.items() if option.is_required and name not in settings]
        if missing:
            raise ValueError(f"missing {', '.join('--' + name for name in missing)}.")
        return [self.instance(cls, settings) for cls in self.classes]

    def instance(self, cls: type, settings: Mapping[str, Setting]) -> Any:
        """An instance of one of the classes."""
        own = {field.name for field in fields(cls) if field.init}
        return cls(**{name: setting.value for name, setting in settings.items() if name in own})


class HelpFormatter(argparse.HelpFormatter):
    """Wide enough for the longest names; option texts start in column 32."""

    def __init__(self, prog: str, **kwargs):
        super().__init__(prog, max_help_position=32, **kwargs)


def dump(instances: Iterable[Any], settings: Mapping[str, Setting]) -> str:
    """Effective values as YAML, each with its origin as a comment; readable as a config file."""
    lines: dict[str, str] = {}
    for instance in instances:
        values = instance.to_dict() if hasattr(instance, "to_dict") else vars(instance)
        for name in (field.name for field in fields(instance) if field.init):
            origin = settings[name].origin if name in settings else "default"
            lines.setdefault(name, f"{name}: {json.dumps(values[name], default=str)}  # {origin}")
    return "\n".join(lines.values())


def _how(option: Option) -> dict[str, Any]:
    """Keyword arguments of `add_argument`."""
    text = option.help.replace("%", "%%")
    if option.default not in (None, "", [], {}) and not option.is_required:
        text += f" (default: {option.default})".replace("%", "%%")
    how: dict[str, Any] = {"type": option.type, "help": text.strip(), "metavar": option.kind_names}
    if option.is_list:
        return how | {"nargs": "+"}
    return how | {"nargs": "?", "const": True} if option.is_switch else how


def _summary(owner: type) -> str:
    return (owner.__doc__ or "").strip().split("\n")[0]
