"""Options that follow from others, told from those that were given: `dataclasses.replace` settles them anew."""

from dataclasses import fields
from typing import Any


class Settled:
    """Marks a number that a config has put where something else was `given`."""

    given: Any


class SettledInt(Settled, int):
    pass


class SettledFloat(Settled, float):
    pass


def settled(value: Any, given: Any = None) -> Any:
    """`value`, a number, marked as what follows in the place of `given`; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    marked = (SettledInt if isinstance(value, int) else SettledFloat)(value)
    marked.given = given
    return marked


def told(value: Any) -> Any:
    """`value` as it was given: None for what only follows from other options."""
    return value.given if isinstance(value, Settled) else value


def as_given(config: Any) -> None:
    """Put back into the dataclass `config` what was given wherever something follows."""
    for field in fields(config):
        setattr(config, field.name, told(getattr(config, field.name)))


def plain(value: Any) -> Any:
    """`value` without a mark."""
    return (int if isinstance(value, int) else float)(value) if isinstance(value, Settled) else value
