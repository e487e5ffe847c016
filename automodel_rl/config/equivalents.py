"""Configuration keys of other trainers and their equivalents here: for suggestions in error messages, and for the
tables of configs/README.md.

The table is equivalents.yaml, which is read only when an unknown key is found.
"""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from pydantic import BaseModel

from automodel_rl.config.keys import describe_keys
from automodel_rl.config.strict_yaml import parse_yaml

MAX_SHOWN = 12
"""Maximum number of keys answered in one message. A complete config of another trainer has hundreds."""

TABLE = "configs/README.md"

SHORTEST = 3
"""Minimum length of a suffix of a dotted name to be looked up: inside a section `rl` is a typo, not axolotl's `rl`."""

TRAINERS = ("trl", "nemo_rl", "verl", "others")


class Equivalent(NamedTuple):
    """Settings of other trainers with the same meaning.

    Attributes:
        here: equivalent dotted keys, the closest first, for every algorithm that has one; empty if there is no
            equivalent.
        note: how values differ, or why there is no equivalent.
        trl: names in TRL, transformers and PEFT.
        nemo_rl: dotted names in NeMo RL.
        verl: dotted names in verl.
        others: names in axolotl, LLaMA-Factory and Unsloth.
    """

    here: tuple[str, ...]
    note: str
    trl: tuple[str, ...]
    nemo_rl: tuple[str, ...]
    verl: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.trl, *self.nemo_rl, *self.verl, *self.others)


def find_equivalent(path: str) -> Equivalent | None:
    """Returns the row of another trainer's key; None if no trainer has the key.

    Args:
        path: the dotted name as given. Leading sections may be missing or differ from those of the other trainer.
    """
    parts = path.split(".")
    ends = [path, *(end for start in range(1, len(parts)) if len(end := ".".join(parts[start:])) >= SHORTEST)]
    return next((row for end in ends if (row := _by_name().get(end))), None)


def hint_for(path: str, kind: type[BaseModel]) -> str | None:
    """Returns the equivalent of another trainer's key as a hint for an error message; None if no trainer has the key.

    Args:
        path: the dotted name as given.
        kind: the config class that the key was found in.
    """
    row = find_equivalent(path)
    if row is None:
        return None
    if not row.here:
        return f"no equivalent setting: {row.note}"
    known = {key.name for key in describe_keys(kind)}
    own = [key for key in row.here if key in known or any(name.startswith(f"{key}.") for name in known)]
    note = f" ({row.note})" if row.note else ""
    if own:
        return f"did you mean {' or '.join(own)}?{note}"
    algorithm = kind.model_fields["algorithm"].default
    return f"{algorithm} does not have this setting; in other algorithms it is {' or '.join(row.here)}{note}"


def hints_for(path: str, value: Any, kind: type[BaseModel]) -> list[str]:
    """Returns `key: hint` for every key of a foreign section that has an equivalent, at most MAX_SHOWN."""
    found = [f"{leaf}: unknown key; {text}" for leaf in _leaves(path, value) if (text := hint_for(leaf, kind))]
    more = [f"and {len(found) - MAX_SHOWN} more keys, listed in {TABLE}"] if len(found) > MAX_SHOWN else []
    return found[:MAX_SHOWN] + more


def _leaves(path: str, value: Any) -> Iterator[str]:
    """Yields the dotted names of the keys in a section. Does not descend into sections that the table lists as a
    whole."""
    names = _by_name()
    if isinstance(value, dict) and (path not in names or any(f"{path}.{key}" in names for key in value)):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield path


@cache
def rows() -> tuple[Equivalent, ...]:
    """Returns all rows of the table."""
    text = (files("automodel_rl.config") / "equivalents.yaml").read_text()
    return tuple(
        Equivalent(tuple(row["here"]), row.get("note", ""), *(tuple(row.get(trainer, ())) for trainer in TRAINERS))
        for row in parse_yaml(text)
    )


@cache
def _by_name() -> dict[str, Equivalent]:
    """Maps each foreign name, and each unambiguous suffix of a dotted name, to its row."""
    whole = {name: row for row in rows() for name in row.names}
    ends: dict[str, set[Equivalent]] = {}
    for name, row in whole.items():
        parts = name.split(".")
        for start in range(1, len(parts)):
            ends.setdefault(".".join(parts[start:]), set()).add(row)
    return {end: found.pop() for end, found in ends.items() if len(found) == 1 and end not in TOO_SHORT} | whole


TOO_SHORT = {
    *("enabled", "enable", "name", "n", "mode", "type", "len", "path", "project", "shuffle", "split", "logger"),
    *("alpha", "dim", "strategy", "contents", "device", "cluster", "ref", "resources", "dtype", "optimizer"),
    *("dropout", "peft", "algorithm"),
}
"""Suffixes that are too general to be looked up."""


def tables() -> str:
    """Returns the table of configs/README.md in Markdown."""
    titles = ("TRL, transformers, PEFT", "NeMo RL", "verl", "axolotl, LLaMA-Factory, Unsloth", "here")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows():
        here = f"{_code(row.here) if row.here else 'not here'}{': ' if row.note else ''}{row.note}"
        lines.append(f"| {' | '.join([*map(_code, row[2:]), here])} |")
    return "\n".join(lines)


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"
