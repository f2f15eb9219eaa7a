"""`TrlParser`: dataclasses from a script's command line and config file, for training scripts of one's own."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.cli.args import Options
from strop.cli.yaml_config import Setting, apply_environment, read_config


@dataclass
class ConfigFile:
    """Where options are read from."""

    config: str | None = None
    """YAML file with the same names as these options; the command line wins over it."""


class TrlParser:
    """Reads `dataclass_types` from the command line and the YAML file that `--config` names, the command line winning.

        parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
        script_args, training_args, model_args = parser.parse_args_and_config()

    Unknown options, in either place, and values of the wrong type end the program with a message and exit code 2.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, prog: str | None = None):
        types = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or [])
        self.prog = prog or sys.argv[0]
        for cls in types:
            if "config" in getattr(cls, "__dataclass_fields__", {}):
                raise ValueError(
                    f"{cls.__name__} has a field named config, which is the option for the YAML file; rename the field."
                )
        self.options = Options(self.prog, [ConfigFile, *types])
        self.defaults: dict[str, Setting] = {}

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """An instance of each dataclass; with `return_remaining_strings`, the words that no option took come last."""
        try:
            instances, remaining = self._parse(sys.argv[1:] if args is None else list(args), fail_with_unknown_args)
        except ValueError as error:
            if args is not None:
                raise
            print(f"{self.prog}: error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        return (*instances, remaining) if return_remaining_strings else tuple(instances)

    def parse_args_into_dataclasses(self, args: Sequence[str] | None = None) -> tuple[Any, ...]:
        """An instance of each dataclass."""
        return self.parse_args_and_config(args)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Use `values` where neither command line nor file say otherwise; returns the others, as words."""
        known = {name: value for name, value in values.items() if name in self.options.names}
        self.defaults |= self.options.read_file({name: Setting(value, "default") for name, value in known.items()})
        return [word for name in values if name not in known for word in (f"--{name}", str(values[name]))]

    def _parse(self, argv: list[str], fail_with_unknown: bool) -> tuple[list[Any], list[str]]:
        words, remaining = self.options.split(argv)
        if {"-h", "--help"} & set(words):
            self.options.parser.print_help()
            raise SystemExit(0)
        said = self.options.read(argv if fail_with_unknown else words)
        file = self._file(said.get("config"))
        if not fail_with_unknown:
            remaining += [word for name in file if name not in self.options.names for word in _words(name, file[name])]
            file = {name: setting for name, setting in file.items() if name in self.options.names}
        settings = self.defaults | self.options.read(words, file)
        return self.options.build(settings)[1:], remaining

    def _file(self, path: Setting | None) -> Mapping[str, Setting]:
        return apply_environment(read_config(path.value)) if path and path.value else {}


def _words(name: str, setting: Setting) -> tuple[str, str]:
    return f"--{name}", str(setting.value)
