"""Checks the options of a reward function: names for every function, values for built-in ones."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from automodel_rl.errors import InputError

NO_OPTION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def _compiles(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError):
        return False
    return isinstance(value, str)


def _is_above_0(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


RULES: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "format": {"pattern": (_compiles, "a valid regular expression")},
    "reward_model": {"path": (lambda value: isinstance(value, str), "a model folder or hub id")},
    "length": {"longest": (_is_above_0, "a number above 0")},
}
"""Rules for options of built-in rewards: a check, and its description for error messages."""


def check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises InputError if the function does not accept (completion, example, **options)."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # functions written in C may have no signature
        return
    except TypeError:
        raise InputError(f"rewards.function={name}: is not a function but {function!r:.60}: name a function") from None
    try:
        signature.bind("completion", "example", **options)
    except TypeError as error:
        raise InputError(_misfit(name, signature, options, error)) from None
    for option, (is_valid, rule) in RULES.get(name, {}).items():
        if not is_valid(options[option]):
            raise InputError(f"rewards.function={name}: options.{option}={options[option]!r} must be {rule}: change it")


def _misfit(name: str, signature: inspect.Signature, options: Mapping[str, Any], error: TypeError) -> str:
    parameters = [*signature.parameters.values()]
    try:
        signature.bind_partial("completion", "example")
    except TypeError:
        return (
            f"rewards.function={name}: cannot be called as function(completion, example) ({error}): use a function of "
            "these two arguments and the options"
        )
    known = [p.name for p in parameters[2:] if p.kind not in (*NO_OPTION, inspect.Parameter.VAR_KEYWORD)]
    remedy = f"use {', '.join(known)}" if known else "it has none: remove options"
    return f"rewards.function={name}: options {dict(options)} do not fit ({error}): {remedy}"
