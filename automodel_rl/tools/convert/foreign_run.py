"""Reads the settings of another trainer's run from a config file or a shell script."""

import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from automodel_rl.errors import InputError
from automodel_rl.files import as_input_error

MAX_BYTES = 4 * 2**20
"""Maximum size of a file. Configs are far smaller."""

MAX_SETTINGS = 100_000
"""Maximum number of settings that are read. YAML's aliases can repeat a section any number of times."""

MAX_PARENTS = 16
"""Maximum number of configs that a config of NeMo RL builds on, one after the other."""

PREFERENCES = ("dpo", "ipo", "orpo", "simpo", "cpo")
"""Names of preference losses in names of files and commands."""

REFERENCE = re.compile(r"\$\{([^{}]*)\}")
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


@dataclass(frozen=True)
class ForeignRun:
    """Settings of another trainer's run.

    Attributes:
        trainer: its name.
        algorithm: the algorithm here.
        settings: values by dotted name. Lists are values.
    """

    trainer: str
    algorithm: str
    settings: dict[str, Any]


def read_foreign(path: Path, algorithm: str | None = None) -> ForeignRun:
    """Reads a config (YAML or JSON) or a shell script.

    Args:
        algorithm: what the run trains; None if the file says it.

    Raises:
        InputError: the file cannot be read, or is of no known trainer.
    """
    words: list[str] = []
    if path.suffix in (".yaml", ".yml", ".json"):
        try:
            settings = dict(_leaves(_read_values(path)))
        except RecursionError:
            raise InputError(f"{path}: a section contains itself") from None
    else:
        settings, words = _read_script(_read_text(path))
    trainer = _trainer_of(settings, words)
    if trainer is None:
        raise InputError(
            f"{path}: is no config of TRL, axolotl, LLaMA-Factory, verl or NeMo RL: none of their keys for a model "
            "is in it; convert reads YAML, JSON and shell scripts"
        )
    words = [*words, *path.parts]
    algorithm = algorithm or _algorithm_of(trainer, settings, words)
    special = next((word for word in _lowered(words) if word in PREFERENCES[1:]), None)
    if trainer == "TRL" and special is not None:  # its ORPO and CPO trainers have no key that says so
        settings = {"loss_type": special, **settings}
    if trainer == "NeMo RL":  # its algorithms' sections have the same keys
        same = {"ppo": "grpo", "rm": "dpo"}
        heads = {name: name.partition(".")[0] for name in settings}
        settings = {same.get(heads[name], heads[name]) + name[len(heads[name]) :]: settings[name] for name in settings}
    return ForeignRun(trainer, algorithm, _without_disabled(settings))


def _without_disabled(settings: dict[str, Any]) -> dict[str, Any]:
    """Removes sections with `enabled: false`."""
    switches = [name for name, value in settings.items() if name.endswith(".enabled") and not value]
    off = tuple(name.removesuffix("enabled") for name in switches)
    return {name: value for name, value in settings.items() if not name.startswith(off)}


def _lowered(words: list[str]) -> list[str]:
    return [part for word in words for part in re.split(r"[/_.-]", word.lower())]


def _trainer_of(settings: dict[str, Any], words: list[str]) -> str | None:
    sections = {name.partition(".")[0] for name in settings}
    has_verl_entry = any(word.startswith("verl.") for word in words)
    if has_verl_entry or "actor_rollout_ref" in sections:
        return "verl"
    if "policy" in sections and {"grpo", "sft", "dpo", "rm", "distillation", "ppo"} & sections:
        return "NeMo RL"
    if {"stage", "finetuning_type", "cutoff_len"} & sections:
        return "LLaMA-Factory"
    if "base_model" in sections:
        return "axolotl"
    return "TRL" if "model_name_or_path" in sections else None


def _algorithm_of(trainer: str, settings: dict[str, Any], words: list[str]) -> str:
    """Returns what a run trains, from the key or command that says it; for TRL's configs, which say it nowhere, from
    the keys of one trainer alone, or the folders of the file."""
    sections = {name.partition(".")[0] for name in settings}
    if trainer == "verl":
        if any("sft_trainer" in word for word in words):
            return "sft"
        return "ppo" if settings.get("algorithm.adv_estimator", "gae") == "gae" else "grpo"
    if trainer == "NeMo RL":
        if "distillation" in sections:
            raise InputError(
                "NeMo RL's distillation, on completions that the student writes, is not converted: here it is grpo "
                "with teachers and no rewards (automodel_rl/trainers/distill.md)"
            )
        names = {"ppo": "ppo", "grpo": "grpo", "dpo": "dpo", "rm": "reward", "sft": "sft"}
        return next(here for there, here in names.items() if there in sections)
    stated = {"LLaMA-Factory": "stage", "axolotl": "rl"}.get(trainer)
    if stated is not None:
        said = str(settings.get(stated) or ("reward" if settings.get("reward_model") else "sft")).lower()
        names = {"rm": "reward", "pt": "sft", "gdpo": "grpo", **dict.fromkeys(PREFERENCES, "dpo")}
        found = names.get(said, said)
    else:
        marks = {
            "grpo": sections & {"num_generations", "reward_funcs", "max_completion_length"},
            "kto": sections & {"desirable_weight", "undesirable_weight"},
            "reward": sections & {"center_rewards_coefficient"},
            "dpo": sections & {"beta", "loss_type", "precompute_ref_log_probs", "max_prompt_length"},
        }
        by_word = {"reward": "reward", "kto": "kto", "grpo": "grpo", "sft": "sft", **dict.fromkeys(PREFERENCES, "dpo")}
        named = next((by_word[word] for word in _lowered(words) if word in by_word), None)
        found = named or next((name for name, keys in marks.items() if keys), "sft")
    if found not in ("sft", "dpo", "kto", "reward", "grpo", "ppo"):
        raise InputError(f"{trainer}'s {found} has no counterpart: say what to train with --algorithm")
    return found


def _read_text(path: Path) -> str:
    with as_input_error(str(path)):
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: is larger than {MAX_BYTES // 2**20} MiB, so it is no config")
        return path.read_text()


def _read_values(path: Path, depth: int = 0) -> dict[str, Any]:
    """Reads a config with those that it builds on (NeMo RL's `defaults`), and resolves its references `${a.b}`."""
    text = _read_text(path)
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: is not a mapping of settings")
    parent = values.pop("defaults", None)
    if isinstance(parent, str) and (path.parent / parent).is_file():
        if depth == MAX_PARENTS:
            raise InputError(f"{path}: builds on more than {MAX_PARENTS} configs")
        values = _merged(_read_values(path.parent / parent, depth + 1), values)
    return values


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(base[key], top[key]) for key in base.keys() & top.keys() if _are_sections(base[key], top[key])}
    return {**base, **top, **both}


def _are_sections(one: Any, other: Any) -> bool:
    return isinstance(one, dict) and isinstance(other, dict)


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted names and values. References to other settings are resolved, as far as they name one."""
    pairs = [*itertools.islice(_named(values, prefix), MAX_SETTINGS)]
    known = dict(pairs)
    for name, value in pairs:
        for _ in range(MAX_PARENTS):
            match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if match is None:
                break
            target = match[1].strip()
            if target.startswith("."):  # relative to its section
                target = ".".join([*name.split(".")[: -len(target) + len(target.lstrip("."))], target.lstrip(".")])
            if target not in known:
                break
            value = known[target]
        yield name, _number(value)


def _named(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _named(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _number(value: Any) -> Any:
    """Turns `1e-5`, which YAML 1.1 takes for a string, into a number."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d_]*(\.\d*)?([eE][-+]?\d+)?", value):
        return float(value) if re.search(r"[.eE]", value) else int(value)
    return value


def _read_script(text: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a script's commands, `key=value` or `--key value`, and its other words."""
    variables: dict[str, str] = {}
    settings: dict[str, Any] = {}
    others: list[str] = []
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that goes on in the next line, as in a function
            continue
        assignment = re.match(r"\s*(?:export\s+)?(\w+)=(.*)", line)
        if assignment is not None and (len(words) <= 2 or "$((" in line):
            value = " ".join(shlex.split(assignment[2], comments=True))
            variables[assignment[1]] = _expanded(value, variables)
            continue
        rest = [_expanded(word, variables) for word in words]
        while rest:
            word = rest.pop(0)
            key, equals, value = word.lstrip("+~").partition("=")
            if word.startswith("--"):
                if not equals:
                    values = []
                    while rest and not rest[0].startswith("--"):
                        values.append(rest.pop(0))
                    settings[key[2:]] = _parsed(values[0] if len(values) == 1 else values or "true")
                else:
                    settings[key[2:]] = _parsed(value)
            elif equals and re.fullmatch(r"[A-Za-z_][\w.@/]*", key):
                settings[key] = _parsed(value)
            else:
                others.append(word)
    return settings, others


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Replaces shell variables that the script has set, and products of numbers; others stay as they are."""
    text = VARIABLE.sub(lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), text)
    return re.sub(r"\$\(\(([\d\s]+(?:\*[\d\s]+)*)\)\)", lambda m: str(math.prod(map(int, m[1].split("*")))), text)


def _parsed(value: Any) -> Any:
    if isinstance(value, list):
        return [_parsed(one) for one in value]
    try:
        return _number(yaml.safe_load(value))
    except yaml.YAMLError:
        return value
