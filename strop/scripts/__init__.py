"""Import paths that users know; the code is in `strop.cli` and `strop.data`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.cli.arguments import ScriptArguments
    from strop.cli.parser import TrlParser
    from strop.data.mixture import DatasetMixtureConfig, get_dataset

_MODULES = {
    "DatasetMixtureConfig": "strop.data.mixture",
    "ScriptArguments": "strop.cli.arguments",
    "TrlParser": "strop.cli.parser",
    "get_dataset": "strop.data.mixture",
}

__all__ = ["DatasetMixtureConfig", "ScriptArguments", "TrlParser", "get_dataset"]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
