"""Loads and checks configs from YAML files and dotted command-line overrides. Every error names its key."""

import re
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from automodel_rl.config.algorithms import (
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    PPOConfig,
    RewardModelConfig,
    SFTConfig,
)
from automodel_rl.config.base import Section
from automodel_rl.config.equivalents import hint_for, hints_for
from automodel_rl.config.keys import describe_keys, inner_section, kinds_of
from automodel_rl.config.run import RunConfig
from automodel_rl.config.serve import ServeConfig
from automodel_rl.config.strict_yaml import StrictYAMLError, parse_yaml, read_yaml
from automodel_rl.errors import InputError, closest

Checked = typing.TypeVar("Checked", bound=Section)

ALGORITHMS: dict[str, type[RunConfig]] = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    "reward": RewardModelConfig,
    "distill": DistillConfig,
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
}

DISTINCTIVE_KEYS = {"ppo": {"critic", "gae"}, "grpo": {"rollout", "rewards", "weight_sync"}, "distill": {"teachers"}}
"""Sections that identify the algorithm of a config without the key `algorithm`."""


def load_config(path: str | Path, overrides: typing.Sequence[str] = (), algorithm: str | None = None) -> Any:
    """Reads a YAML file, applies overrides and checks the result.

    Args:
        path: the YAML file.
        overrides: `--dotted.key value` or `--dotted.key=value`, as on the command line; values are YAML. List items are
            addressed by index, as in `--data.train.0.path`.
        algorithm: the algorithm that the config must be for, one of `ALGORITHMS`. Defaults to the config's key
            `algorithm`, else to the one its sections identify, else "sft".

    Returns:
        The config of the algorithm, e.g. an `SFTConfig`.

    Raises:
        InputError: the file is missing or malformed, or a key or value is wrong.

    Example:
        >>> config = load_config("configs/qwen3_0.6b/sft.yaml", ["--optimizer.lr", "1e-5"])
        >>> config.algorithm, config.optimizer.lr
        ('sft', 1e-05)
    """
    values = _read(path, overrides, lambda values: ALGORITHMS.get(_likely(values, algorithm), SFTConfig))
    likely = _likely(values, algorithm)
    given = values.get("algorithm", likely)
    if isinstance(given, dict):  # a section of another trainer that has this name
        raise InputError(
            "; ".join(hints_for("algorithm", given, ALGORITHMS.get(likely, SFTConfig)))
            or f"{path}: algorithm: must be a string"
        )
    if not isinstance(given, str) or given not in ALGORITHMS:
        raise InputError(f"{path}: algorithm: {given!r} is not one of {', '.join(ALGORITHMS)}")
    if algorithm not in (None, given):
        raise InputError(f"{path}: is a config for {given}, not {algorithm}: run automodel-rl {given}")
    return check_config(ALGORITHMS[given], values)


def load_serve_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> ServeConfig:
    """Reads and checks the config of a service, like `load_config`."""
    return check_config(ServeConfig, _read(path, overrides, lambda _: ServeConfig))


def _likely(values: dict[str, Any], algorithm: str | None) -> str:
    """Returns the algorithm that a config most likely belongs to."""
    given = values.get("algorithm")
    if isinstance(given, str) and given in ALGORITHMS:
        return given
    return next((name for name, keys in DISTINCTIVE_KEYS.items() if keys & values.keys()), algorithm or "sft")


def _read(
    path: str | Path, overrides: typing.Sequence[str], kind_of: Callable[[dict[str, Any]], type[BaseModel]]
) -> dict[str, Any]:
    """Reads a YAML file and applies overrides. `kind_of` returns the config class for the file's values."""
    values = read_yaml(Path(path))
    kind = kind_of(values)
    for key, text in parse_overrides(overrides, kind):
        _assign(values, key, _parse_value(key, text), kind)
    return values


def config_of_model(folder: str, overrides: typing.Sequence[str]) -> RunConfig:
    """Returns an `sft` config for a model folder, with overrides and placeholder data."""
    values: dict[str, Any] = {
        "model": {"path": folder},
        "data": {"train": [{"path": "none"}]},
        "batch": {"sequences": 1},
        "length": {"steps": 1},
        "output": "none",
    }
    for key, text in parse_overrides(overrides):
        _assign(values, key, _parse_value(key, text))
    return check_config(ALGORITHMS["sft"], values)


def check_config(kind: type[Checked], values: dict[str, Any]) -> Checked:
    """Validates plain values.

    Raises:
        InputError: a key or value is wrong.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InputError("; ".join(explain_each(error.errors(), kind))) from None


def dump_config(config: Section) -> str:
    """Formats the resolved config, defaults included, as YAML that `load_config` can read."""
    values = config.model_dump(mode="json")
    if values.get("components") is not None:
        del values["parallel"]  # the same as the language component's layout
    return yaml.safe_dump(values, sort_keys=False)


def parse_overrides(arguments: typing.Sequence[str], kind: type[BaseModel] = SFTConfig) -> list[tuple[str, str]]:
    """Splits overrides into key and value: `["--a.b", "1", "--c=2"]` becomes `[("a.b", "1"), ("c", "2")]`. `kind` is
    the config class, for error messages.

    Raises:
        InputError: a key has no value.
    """
    pairs, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise InputError(f"unexpected argument {argument!r}: overrides look like --optimizer.lr 1e-5")
        key, equals, text = argument[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                hint = hint_for(key, kind) or "overrides look like --optimizer.lr 1e-5, with = before a value in --"
                raise InputError(f"--{key} has no value: {hint}")
            text = rest.pop(0)
        pairs.append((key.replace("-", "_"), text))
    return pairs


def completed(values: Any, config: RunConfig) -> Any:
    """Fills a dumped config with the defaults of missing keys. Returns it unchanged if it does not fit the class of
    `config`."""
    try:
        return parse_yaml(dump_config(type(config).model_validate(values)))
    except ValidationError:
        return values


def differing_keys(one: Any, other: Any, prefix: str = "") -> list[str]:
    """Returns the dotted keys whose values differ between two dumped configs."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return [d for key in keys for d in differing_keys(one.get(key), other.get(key), f"{prefix}{key}.")]
    return [] if one == other else [prefix.rstrip(".")]


def _parse_value(key: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except StrictYAMLError as error:
        raise InputError(
            f"--{key}: {text!r} is not a YAML value ({error.problem}): quote it if it is a string"
        ) from None


def _assign(values: Any, key: str, value: Any, kind: type[BaseModel] = SFTConfig) -> None:
    *path, last = key.split(".")
    for place, name in enumerate(path):
        if isinstance(values, list):
            values = values[_list_place(key, name, values)]
        else:
            if values.get(name) is None:
                values[name] = {}
            elif isinstance(values[name], str) and values[name] in _kinds_at(kind, path[: place + 1]):
                values[name] = {"kind": values[name]}
            values = values[name]
        if not isinstance(values, dict | list):
            raise InputError(f"--{key}: {hint_for(key, kind) or f'{name} is a value, not a section'}")
    if isinstance(values, list):
        values[_list_place(key, last, values)] = value
    elif _names_the_kind_of(value, values.get(last), _kinds_at(kind, [*path, last])):
        values[last]["kind"] = value
    else:
        values[last] = value


def _names_the_kind_of(value: Any, section: Any, kinds: Iterable[str]) -> bool:
    """Whether a value is just the name of the kind of an existing section, which keeps its other keys."""
    return (
        isinstance(value, str) and isinstance(section, dict) and value in kinds and section.get("kind", value) == value
    )


def _kinds_at(kind: type[BaseModel], path: Sequence[str]) -> Iterable[str]:
    """Returns the kinds that a key accepts as a bare name."""
    *before, last = path
    section = _section_at(kind, tuple(before))
    return _inside(section, last)[1].keys()


def _list_place(key: str, name: str, values: list[Any]) -> int:
    if not name.isdecimal() or int(name) >= len(values):
        raise InputError(f"--{key}: {name} is not an index of a list of {len(values)}; indices start at 0")
    return int(name)


KINDS = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be a string",
    "list": "must be a list",
    "tuple": "must be a list",
    "dict": "must be a section of keys and values",
    "model": "must be a section of keys and values",
    "finite_number": "must be a finite number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "too_short": "must have a length of at least {min_length}",
    "too_long": "must have a length of at most {max_length}",
}
"""Error messages by pydantic's error type or its first part."""

BRANCH = re.compile(r"(literal|tuple|list|dict|function-\w+)\[.*|constrained-\w+|int|float|str|bool|\[key\]")
"""Matches parts of pydantic's error locations that denote a member of a union rather than a key."""

Detail = Any
"""An error in pydantic's format."""


def explain_each(details: Sequence[Detail], kind: type[BaseModel]) -> list[str]:
    """Formats all errors of a config: missing required keys first, in one sentence, then one text per wrong key."""
    missing = [_place(detail, kind) for detail in details if detail["type"] == "missing"]
    found: dict[str, list[Detail]] = {}
    for detail in details:
        if detail["type"] != "missing":
            found.setdefault(_place(detail, kind), []).append(detail)
    # pydantic also reports a list with an invalid item as too short.
    inner = [place for place in found if not any(other.startswith(f"{place}.") for other in found)]
    texts = [_explain(found[place], place, kind) for place in inner]
    if missing:
        named = ", ".join(_with_keys(place, kind) for place in missing)
        texts.insert(0, f"{named}: {'this key is' if len(missing) == 1 else 'these keys are'} required")
    return texts


def _with_keys(place: str, kind: type[BaseModel]) -> str:
    """Formats a missing key, followed by the keys of its section if it is one."""
    section = _section_at(kind, tuple(place.split(".")))
    required = [] if section is None else [name for name, info in section.model_fields.items() if info.is_required()]
    return f"{place} (with {', '.join(required or section.model_fields)})" if section is not None else place


def _place(detail: Detail, kind: type[BaseModel]) -> str:
    """Returns the dotted key of an error."""
    return ".".join(_walk(kind, detail["loc"])[0])


def _explain(details: Sequence[Detail], where: str, kind: type[BaseModel]) -> str:
    """Formats the errors of one key: `key: the rule, not the given value`. A value of a union type has one error per
    member."""
    detail = details[0]
    if detail["type"].startswith("union_tag_"):
        return f"{where}: {_kind_rule(detail, kind)}"
    if detail["type"] == "extra_forbidden":
        return _unknown(where, detail, kind)
    prefix = f"{where}: " if where else ""
    if detail["type"] == "value_error":
        return f"{prefix}{detail['msg'].removeprefix('Value error, ')}"
    first, *others = dict.fromkeys(map(_rule, details))
    rule = " or ".join([first, *(other.removeprefix("must be ") for other in others)])
    hint = hint_for(where, kind) if detail["type"].startswith("model_") else None
    return f"{prefix}{rule}, not {detail['input']!r}{f'; {hint}' if hint else ''}"


def _kind_rule(detail: Detail, kind: type[BaseModel]) -> str:
    """Formats the error of a section whose kind is missing or unknown."""
    *before, last = detail["loc"]
    kinds, given = _inside(_section_at(kind, tuple(before)), last)[1], detail["input"]
    known = ", ".join(kinds)
    if detail["type"] == "union_tag_invalid":
        tag = str(given["kind"])
        near = closest(tag, [*kinds])
        return f"must be one of {known}, not {tag!r}" + (f"; did you mean {near}?" if near else "")
    slip = closest("kind", [str(key) for key in given])
    if slip:
        return f"{slip}: unknown key; did you mean kind?"
    fit = [name for name, section in kinds.items() if given.keys() <= section.model_fields.keys()]
    beside = f", in addition to {', '.join(map(str, given))}" if given else ""
    return f"must set its kind, {f'such as kind: {fit[0]}' if given and fit else f'one of {known}'}{beside}"


def _rule(detail: Detail) -> str:
    """Returns the message for the rule that a value violates."""
    name = next((name for name in (detail["type"], detail["type"].split("_")[0]) if name in KINDS), None)
    return str(detail["msg"]) if name is None else KINDS[name].format_map(detail.get("ctx", {}))


def _unknown(where: str, detail: Detail, kind: type[BaseModel]) -> str:
    """Formats the error of an unknown key: suggests the equivalent of another trainer's key, or the closest known
    key."""
    section = _section_at(kind, detail["loc"][:-1])
    if section is None:
        return f"{where}: unknown key"
    known = [info.alias or name for name, info in section.model_fields.items()]
    others = _kinds_with(detail["loc"], kind)
    if others:
        own = section.model_fields["kind"].default
        return f"{where}: is a key of {' and '.join(others)}, but this is {own}; its keys are {', '.join(known)}"
    close = closest(str(detail["loc"][-1]), known)
    foreign = hints_for(where, detail["input"], kind)
    if foreign:
        return "; ".join(foreign)
    if not close and issubclass(section, RunConfig):  # it may be the name of a key inside a section
        names = [found.name for found in describe_keys(section)]
        close = next((name for name in names if name.split(".")[-1] == where), None)
    return f"{where}: unknown key; " + (f"did you mean {close}?" if close else f"known keys are {', '.join(known)}")


def _kinds_with(location: tuple[int | str, ...], kind: type[BaseModel]) -> list[str]:
    """Returns the other kinds that have an unknown key's name."""
    if len(location) < 3:
        return []
    *before, holder, own, key = location
    kinds = _inside(_section_at(kind, tuple(before)), holder)[1]
    return [name for name, section in kinds.items() if own in kinds and key in section.model_fields]


def _section_at(kind: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Returns the section class at a location such as ("data", "train", 0)."""
    return _walk(kind, location)[1]


def _walk(kind: type[BaseModel], location: Sequence[int | str]) -> tuple[list[str], type[BaseModel] | None]:
    """Returns the keys of a location, without the parts for kinds and union members, and the section class at its
    end."""
    keys: list[str] = []
    section: type[BaseModel] | None = kind
    kinds: dict[str, type[BaseModel]] = {}
    for part in location:
        if part in kinds:
            section, kinds = kinds[str(part)], {}
        elif not BRANCH.fullmatch(str(part)):
            keys.append(str(part))
            section, kinds = _inside(section, part)
    return keys, section


def _inside(
    section: type[BaseModel] | None, part: int | str
) -> tuple[type[BaseModel] | None, dict[str, type[BaseModel]]]:
    """Returns the section class below a key or list index, and the kinds by name if the key chooses among several."""
    if section is None or isinstance(part, int):
        return section, {}
    fields = {info.alias or name: info.annotation for name, info in section.model_fields.items()}
    kinds = kinds_of(fields.get(part))
    return None if kinds else inner_section(fields.get(part)), kinds
