"""Descriptions of all config keys for `--help`: names, defaults, allowed values and meanings."""

import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel


class Key(NamedTuple):
    """A config key.

    Attributes:
        name: dotted name.
        default: default in YAML syntax, or "required".
        meaning: the field's docstring.
        values: short form of the allowed values.
        choices: the allowed values if they form a fixed set; otherwise empty.
    """

    name: str
    default: str
    meaning: str
    values: str
    choices: tuple[str, ...]


def describe_keys(kind: type[BaseModel], prefix: str = "") -> list[Key]:
    """Returns all keys of a config section and its subsections."""
    rows: list[Key] = []
    for field, info in kind.model_fields.items():
        name = f"{prefix}{info.alias or field}"
        if kinds := kinds_of(info.annotation):
            default = info.get_default(call_default_factory=True).kind
            rows.append(Key(name, default, info.description or "", "|".join(kinds), tuple(kinds)))
            rows.append(Key(f"{name}.kind", default, "Which kind to use.", "|".join(kinds), tuple(kinds)))
            rows += _keys_of_kinds(kinds, f"{name}.")
            continue
        section = inner_section(info.annotation)
        if section is None or section is not info.annotation:
            default = "required" if info.is_required() else as_yaml(info.get_default(call_default_factory=True))
            values = "|".join(dict.fromkeys(_values(info.annotation)))
            rows.append(Key(name, default, info.description or "", values, _choices(info.annotation)))
        if section is not None:
            item = ".0" if typing.get_origin(info.annotation) is tuple else ""
            rows += describe_keys(section, f"{name}{item}.")
    return rows


def kinds_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """Maps each value of the key `kind` to its section class if a field is a union of such sections; otherwise returns
    {}."""
    members = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else ()
    sections = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
    return {one.model_fields["kind"].default: one for one in sections if "kind" in one.model_fields}


def _keys_of_kinds(kinds: dict[str, type[BaseModel]], prefix: str) -> Iterator[Key]:
    """Yields each key that any of the kinds has, except `kind`, labelled with the kinds that have it."""
    found: dict[str, list[Key]] = {}
    for kind, section in kinds.items():
        for key in describe_keys(section, prefix):
            default = f"required with {kind}" if key.default == "required" else key.default
            own = key._replace(meaning=f"{kind}: {key.meaning}", default=default)
            found.setdefault(key.name, []).append(own)
    for name, (first, *others) in found.items():
        if name != f"{prefix}kind":
            meaning = " ".join(key.meaning for key in (first, *others))
            values = "|".join(dict.fromkeys(v for key in (first, *others) for v in key.values.split("|")))
            defaults = dict.fromkeys(f"{key.default} with {key.meaning.partition(':')[0]}" for key in (first, *others))
            same = len({key.default for key in (first, *others)}) == 1
            yield first._replace(meaning=meaning, values=values, default=first.default if same else ", ".join(defaults))


def inner_section(annotation: Any) -> type[BaseModel] | None:
    """Returns the section class that an annotation is or contains; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.GenericAlias | types.UnionType) or typing.get_origin(annotation) is not None:
        return next((s for a in typing.get_args(annotation) if (s := inner_section(a))), None)
    return None


def as_yaml(value: Any) -> str:
    """Formats a plain value as one line of YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | dict) and not value:
        return "[]" if isinstance(value, tuple) else "{}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    return str(value)


NAMES = {int: "N", float: "X", str: "TEXT", bool: "true|false", type(None): "null", dict: "{...}"}
"""Placeholders for values of a type in help."""


def _values(annotation: Any) -> list[str]:
    """Returns short texts for the values that an annotation allows."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return [as_yaml(value) for value in arguments]
    if origin is typing.Annotated:
        return _values(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return [text for argument in arguments for text in _values(argument)]
    if origin is tuple:
        inner = "|".join(_values(arguments[0]))
        return [f"[{inner}, ...]"] if Ellipsis in arguments else [f"[{', '.join([inner] * len(arguments))}]"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ["{...}"]
    return [NAMES.get(origin or annotation, "VALUE")]


def _choices(annotation: Any) -> tuple[str, ...]:
    """Returns the allowed values of an annotation if they form a fixed set."""
    values = [text for value in _values(annotation) for text in value.split("|")]
    return tuple(values) if all(value.islower() or value.isdecimal() for value in values) else ()
