"""Dataclass fields as options of a command: name, type, help, default, and the class that owns them."""

import ast
import enum
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

KINDS = {int: "integer", float: "number", bool: "true|false", dict[str, Any]: "JSON", str: "text"}
"""What a value on the command line may be -> how help and errors call it. The first that fits is taken."""


@dataclass(frozen=True)
class Option:
    """One option. `kinds` are those of `KINDS` that a value may be; a list takes several values."""

    name: str
    kinds: tuple[Any, ...]
    takes_none: bool
    is_list: bool
    help: str
    owner: type
    default: Any

    @property
    def type(self) -> Any:
        """The type of one value."""
        none = (type(None),) if self.takes_none and not self.is_list else ()
        return Union[self.kinds + none]  # noqa: UP007

    @property
    def kind_names(self) -> str:
        return "|".join(KINDS[kind] for kind in self.kinds)

    @property
    def is_switch(self) -> bool:
        """Whether the name alone means true."""
        return bool in self.kinds

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    def spelt(self, value: str) -> str:
        """`value` as the parser reads it: "none" unsets an option that takes no text."""
        return "null" if self.takes_none and str not in self.kinds and value in ("none", "None") else value


def options_of(*classes: type) -> dict[str, Option]:
    """Name -> option, for every field that the constructors of `classes` take; a shared name is one option."""
    options: dict[str, Option] = {}
    for cls in classes:
        hints, docs, owners = get_type_hints(cls), field_docs(cls), field_owners(cls)
        for field in fields(cls):
            if field.init and field.name not in options:
                options[field.name] = _option(field, hints[field.name], docs[field.name], owners[field.name])
    return options


def _option(field: Field, hint: Any, text: str, owner: type) -> Option:
    is_union = get_origin(hint) in (Union, types.UnionType)
    hints = get_args(hint) if is_union else (hint,)
    members = {_kind(member) for member in hints}
    elements = {_kind(element) for member in hints if get_origin(member) is list for element in get_args(member)}
    return Option(
        name=field.name,
        kinds=tuple(kind for kind in KINDS if kind in (elements or members)),
        takes_none=type(None) in members,
        is_list=list in members,
        help=text,
        owner=owner,
        default=field.default_factory() if field.default_factory is not MISSING else field.default,
    )


def _kind(hint: Any) -> Any:
    """What a command line can say for a type: an enum's value, a function's name, a dict for a nested object."""
    origin = get_origin(hint) or hint
    if origin is list or hint in KINDS or hint is type(None):
        return list if origin is list else hint
    if origin is Literal:
        return bool if all(isinstance(value, bool) for value in get_args(hint)) else str
    if origin is Callable or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return str
    return dict[str, Any]


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> its documentation, over the dataclass and its bases.

    Our classes document a field by the string under it, others by `metadata["help"]`.
    """
    docs = {field.name: field.metadata.get("help") or "" for field in fields(cls)}
    for base in reversed(cls.__mro__):
        if is_dataclass(base) and base.__module__.startswith("strop."):
            docs |= _strings_under_fields(base)
    return {name: " ".join(text.split()) for name, text in docs.items()}


def field_owners(cls: type) -> dict[str, type]:
    """Field name -> the class of the composition that has it first, from the most basic one up."""
    owners: dict[str, type] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            for name in inspect.get_annotations(base):
                owners.setdefault(name, base)
    return {field.name: owners[field.name] for field in fields(cls)}


def _strings_under_fields(cls: type) -> dict[str, str]:
    definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    docs = {}
    for pair in itertools.pairwise(definition.body if isinstance(definition, ast.ClassDef) else []):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = text
    return docs
