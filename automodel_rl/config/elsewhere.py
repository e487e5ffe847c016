"""Keys of other trainers, with those here that mean the same: for suggestions, and for the tables of configs/README.md.

They are in elsewhere.yaml, which is read when a key is not known.
"""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from pydantic import BaseModel

from automodel_rl.config.keys import describe_keys
from automodel_rl.config.strict_yaml import parse_yaml

MOST_SHOWN = 12
"""Most keys of a config that are answered. A whole config of another trainer has hundreds."""

TABLE = "configs/README.md"

SHORTEST = 3
"""Letters of the shortest name that is known inside a section: there `rl` is a slip, and not axolotl's `rl`."""

TRAINERS = ("trl", "nemo_rl", "verl", "others")


class Elsewhere(NamedTuple):
    """Settings of other trainers with the same meaning.

    Attributes:
        here: the dotted keys here, the nearest first; of each algorithm those that it has. None where nothing is set.
        note: how values differ, or why there is nothing to set.
        trl: names of TRL, transformers and PEFT.
        nemo_rl: dotted names of NeMo RL.
        verl: dotted names of verl.
        others: names of axolotl, LLaMA-Factory and Unsloth.
    """

    here: tuple[str, ...]
    note: str
    trl: tuple[str, ...]
    nemo_rl: tuple[str, ...]
    verl: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all trainers."""
        return (*self.trl, *self.nemo_rl, *self.verl, *self.others)


def answer(path: str, kind: type[BaseModel]) -> str | None:
    """What to write here for a key of another trainer; None if no trainer has it.

    Args:
        path: its dotted name, as it was given. What stands before it in another config may be left out, or differ.
        kind: the config that it was given in.
    """
    parts = path.split(".")
    ends = [path, *(end for start in range(1, len(parts)) if len(end := ".".join(parts[start:])) >= SHORTEST)]
    row = next((row for end in ends if (row := _by_name().get(end))), None)
    if row is None:
        return None
    if not row.here:
        return f"there is no such setting: {row.note}"
    known = {key.name for key in describe_keys(kind)}
    own = [key for key in row.here if key in known or any(name.startswith(f"{key}.") for name in known)]
    note = f" ({row.note})" if row.note else ""
    if own:
        return f"did you mean {' or '.join(own)}?{note}"
    algorithm = kind.model_fields["algorithm"].default
    return f"{algorithm} has no such setting; with other algorithms it is {' or '.join(row.here)}{note}"


def answers(path: str, value: Any, kind: type[BaseModel]) -> list[str]:
    """The answers to a section of another trainer: one for each key in it that has one, as `key: answer`."""
    found = [f"{leaf}: unknown key; {text}" for leaf in _leaves(path, value) if (text := answer(leaf, kind))]
    more = [f"and {len(found) - MOST_SHOWN} keys more, which {TABLE} has"] if len(found) > MOST_SHOWN else []
    return found[:MOST_SHOWN] + more


def _leaves(path: str, value: Any) -> Iterator[str]:
    """Dotted names of the keys in a section. A section that the tables have as a whole is not looked into."""
    names = _by_name()
    if isinstance(value, dict) and (path not in names or any(f"{path}.{key}" in names for key in value)):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield path


@cache
def rows() -> tuple[Elsewhere, ...]:
    """All rows of the tables."""
    text = (files("automodel_rl.config") / "elsewhere.yaml").read_text()
    return tuple(
        Elsewhere(tuple(row["here"]), row.get("note", ""), *(tuple(row.get(trainer, ())) for trainer in TRAINERS))
        for row in parse_yaml(text)
    )


@cache
def _by_name() -> dict[str, Elsewhere]:
    """The row of every name, and of every end of a dotted name that means one thing."""
    whole = {name: row for row in rows() for name in row.names}
    ends: dict[str, set[Elsewhere]] = {}
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
"""Ends of names that may mean anything."""


def tables() -> str:
    """The tables of the page on configs."""
    titles = ("TRL, transformers, PEFT", "NeMo RL", "verl", "axolotl, LLaMA-Factory, Unsloth", "here")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows():
        here = f"{_code(row.here) if row.here else 'not here'}{': ' if row.note else ''}{row.note}"
        lines.append(f"| {' | '.join([*map(_code, row[2:]), here])} |")
    return "\n".join(lines)


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"
