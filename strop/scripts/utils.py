"""An import path that users know."""

from strop.cli.arguments import ScriptArguments
from strop.cli.parser import TrlParser
from strop.data.mixture import DatasetMixtureConfig, get_dataset

__all__ = ["DatasetMixtureConfig", "ScriptArguments", "TrlParser", "get_dataset"]
