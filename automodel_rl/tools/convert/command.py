"""`automodel-rl convert`: writes a config from a config or script of another trainer, and lists what has no counterpart
here."""

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from automodel_rl.config import ALGORITHMS, describe_keys
from automodel_rl.config.equivalents import Equivalent, rows
from automodel_rl.config.keys import Key, as_yaml
from automodel_rl.config.load import explain_each
from automodel_rl.errors import InputError
from automodel_rl.files import as_input_error, check_writable, write_atomic
from automodel_rl.tools.convert.conversion import Conversion
from automodel_rl.tools.convert.foreign_run import ForeignRun, read_foreign
from automodel_rl.tools.convert.sources import data, generator, rewards
from automodel_rl.tools.convert.training import (
    DECAYS,
    adapters,
    batch,
    layout,
    length,
    loss,
    optimizer,
    precision,
    rollout_batch,
)
from automodel_rl.tools.convert.values import AsIsError, NotConvertibleError, converted

SAME_NAME_SECTIONS = ("optimizer", "loss", "checkpoint", "length", "rollout", "")
"""Sections whose keys other trainers have under the same last name, such as weight_decay."""

REQUIRED = (
    "output",
    "model.path",
    "data.train",
    "batch.",
    "length.steps",
    "length.epochs",
    "rollout.prompts",
    "rewards",
)
"""Keys without which a config is refused."""


def convert(path: Path, out: Path, algorithm: str | None = None, num_gpus: int = 1) -> None:
    """Writes the config and prints what it is based on.

    Args:
        algorithm: what to train, if the file does not say it.
        num_gpus: GPUs of the run, if the file does not say it; batch sizes per device are multiplied by it.

    Raises:
        InputError: the file cannot be read or converted, or `out` exists.
    """
    if os.path.lexists(out):
        raise InputError(f"{out}: already exists: pass another file to --out")
    check_writable(out.parent, f"--out {out}")
    run = read_foreign(path, algorithm)
    target = convert_run(run, num_gpus)
    with as_input_error(f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, text_of(target, path))
    print(f"{out}: a config for {run.algorithm}, from {len(run.settings)} settings of {run.trainer}")
    for line in [*target.notes, *_left_out(target)]:
        print(line)
    print(f"next: automodel-rl {run.algorithm} {out} --show")


def convert_run(run: ForeignRun, num_gpus: int = 1) -> Conversion:
    """Converts groups of settings that belong together, then each other setting by the table of equivalents. Keys whose
    value a config refuses are left out, with the refusal as the reason."""
    target = Conversion(run)
    is_online = run.algorithm in ("grpo", "ppo")
    target.put("output", f"runs/{run.algorithm}", "")
    target.put("optimizer.decay", DECAYS[run.trainer], "")
    precision(target)
    layout(target, num_gpus)
    (rollout_batch if is_online else batch)(target, num_gpus)
    for group in (length, optimizer, adapters, loss, data, *((rewards, generator) if is_online else ())):
        group(target)
    keys = {key.name: key for key in describe_keys(ALGORITHMS[run.algorithm])}
    for name, value in run.settings.items():
        if name not in target.used and value not in (None, "", [], {}):
            _convert_one(target, name, value, keys)
    if "observe.trackers" not in target.values:
        target.values.pop("observe.project", None)
    _remove_refused(target)
    is_default = {key for key in target.values if key in keys and as_yaml(target.values[key]) == keys[key].default}
    target.values = {key: value for key, value in target.values.items() if key not in is_default}
    return target


def _convert_one(target: Conversion, name: str, value: Any, keys: dict[str, Key]) -> None:
    try:
        key = _key_for(name, value, keys, target.run.algorithm)
        result = converted(key, value)
    except AsIsError:
        return
    except NotConvertibleError as reason:
        target.left_out[name] = str(reason)
        return
    if key not in target.values or key in ("output", "optimizer.decay"):
        target.put(key, result, name)


def _key_for(name: str, value: Any, keys: dict[str, Key], algorithm: str) -> str:
    """Returns the key here that a foreign setting is converted to."""
    row = _by_name().get(name)
    same = [f"{section}.{name}".lstrip(".") for section in SAME_NAME_SECTIONS]
    found = next((key for key in (same if row is None else row.here) if key in keys), None)
    if found is not None and not found.startswith(("data.train.", "data.validation.")):
        return found
    if value is False or (row and row.here[:1] == ("data.overlong",)):  # prompts that are too long are dropped
        raise AsIsError
    parent = name
    while row is None and "." in parent:
        parent = parent.rpartition(".")[0]
        row = _by_name().get(parent)
    if row is None:
        raise NotConvertibleError("no such setting here")
    see = f"see {row.here[0]}" if any(key.startswith(row.here[:1]) for key in keys) else f"not for {algorithm}"
    raise NotConvertibleError(see if row.here else row.note)


@cache
def _by_name() -> dict[str, Equivalent]:
    return {name: row for row in rows() for name in row.names}


def _remove_refused(target: Conversion) -> None:
    """Checks the config, and leaves out each value that is refused, until none is.

    Raises:
        InputError: what is refused is a key that a config must have.
    """
    kind = ALGORITHMS[target.run.algorithm]
    while True:
        try:
            kind.model_validate(nested(target.values))
            return
        except ValidationError as error:
            refusals = explain_each(error.errors(), kind)
        named = [(key, refusal) for refusal in refusals if (key := next(_mentioned(refusal, target.values), None))]
        if not named:
            raise InputError("; ".join(refusals))
        for key, refusal in named:
            if target.values.pop(key, None) is not None:
                target.left_out[target.sources.pop(key) or key] = f"refused here ({refusal})"


def _mentioned(refusal: str, values: dict[str, Any]) -> Iterator[str]:
    """Yields the keys that a refusal names, in its order, or whose section it names; none that a config must have."""
    places = {key: re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", refusal) for key in values}
    named = refusal.partition(":")[0]
    yield from (
        key
        for key, place in sorted(places.items(), key=lambda pair: pair[1].start() if pair[1] else len(refusal))
        if (place or key.startswith(f"{named}.")) and not key.startswith(REQUIRED)
    )


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Turns dotted keys into sections. Parts that are numbers index lists."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return tree


class _PlainDumper(yaml.SafeDumper):
    """Writes equal objects twice rather than as anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def text_of(target: Conversion, path: Path) -> str:
    """Returns the config as YAML, with the notes above it and what was left out below."""
    head = [f"Converted from {path.name} of {target.run.trainer} by automodel-rl convert.", *target.notes]
    values, order = nested(target.values), ALGORITHMS[target.run.algorithm].model_fields
    values = {"algorithm": target.run.algorithm, **{key: values[key] for key in order if key in values}}
    body = yaml.dump(values, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=100)
    return "".join(
        [
            *(f"# {line}\n" for line in head),
            body,
            *(f"# {line}\n" for line in _left_out(target)),
        ]
    )


def _left_out(target: Conversion) -> list[str]:
    if not target.left_out:
        return []
    by_reason: dict[str, list[str]] = {}
    for name, reason in target.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    lines = [f"  {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return [f"without a counterpart ({len(target.left_out)}):", *lines]
