"""Reward functions: (completion, example) -> score. Imports are light, as every reward has its own process."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from automodel_rl.errors import InputError
from automodel_rl.import_path import import_function
from automodel_rl.rollout.rewards.reward_model import open_reward_model, served_reward_model

Example = Mapping[str, Any]
RewardFn = Callable[..., Any]

QUOTIENT = re.compile(r"(x\s*=\s*)?-?(\\[dt]?frac\{-?\d+\}\{-?\d+\}|\d+\s*(/|\\div)\s*\d+)")
"""A fraction of integers, which math-verify evaluates if the result is an integer."""

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact_match(completion: str, example: Example) -> float:
    """Returns 1 if the completion equals the answer, apart from surrounding whitespace."""
    return float(completion.strip() == str(example["answer"]).strip())


def last_number(completion: str, example: Example) -> float:
    """Returns 1 if the last number of the completion equals the last number of the answer."""
    written, expected = _last_number(completion), _last_number(str(example["answer"]))
    return float(written is not None and written == expected)


def math(completion: str, example: Example) -> float:
    """Returns 1 if math-verify finds the completion's result equal to the answer.

    An unevaluated calculation scores 0, such as 15 - 26 for -11. Otherwise a policy learns within some twenty steps to
    repeat the problem.
    """
    from math_verify import parse, verify

    # math-verify's own time limits need the main thread's alarm; the call's time limit is enough. It warns of that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected = parse(f"${example['answer']}$", parsing_timeout=None)
    found = parse(completion, parsing_timeout=None)
    if expected and found and _is_calculation(found[0], str(found[-1])) and not _is_calculation(expected[0]):
        return 0.0
    return float(verify(expected, found, timeout_seconds=None))


def format(completion: str, example: Example, pattern: str) -> float:
    """Returns 1 if the whole completion matches a regular expression, in which . also matches newlines."""
    return float(re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)


def length(completion: str, example: Example, longest: int) -> float:
    """Returns 0 up to `longest` words, then linearly less: -1 at twice as many."""
    return min(0.0, 1 - len(completion.split()) / longest)


def reward_model(
    completions: Sequence[str], examples: Sequence[Example], path: str, device: str = "cpu", dtype: str = "auto"
) -> list[float]:
    """Returns the scores of a reward model, opened once per process."""
    return open_reward_model(path, device, dtype)([*completions], [*examples])


def environment(completion: str, example: Example) -> float:
    """Returns the sum of the rewards of the conversation's environment."""
    return float(example["environment_reward"])


BUILT_IN: dict[str, RewardFn] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "math": math,
    "format": format,
    "length": length,
    "environment": environment,
    "reward_model": reward_model,
    "served_reward_model": served_reward_model,
}
"""Built-in reward functions, by their names in a config."""


def _math_answer(completion: str) -> str | None:
    from math_verify import parse

    found = parse(completion, parsing_timeout=None)
    return str(found[0]) if found else None


ANSWERS: dict[str, Callable[[str], Any]] = {
    "exact_match": str.strip,
    "last_number": lambda completion: _last_number(completion),
    "math": _math_answer,
}
"""Functions that extract a completion's answer, for majority votes, by names of built-in rewards."""

OPENED: dict[str, Callable[..., object]] = {"reward_model": open_reward_model}
"""Functions that a built-in reward's process calls at its start, with the reward's options."""

ANSWER = "answer"
"""Name of the metric that is a text: the completion's answer."""


def find_reward(name: str) -> RewardFn:
    """Returns the reward function of a built-in name or an import path `package.module:function`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise InputError(f"rewards.function={name}: use one of {', '.join(BUILT_IN)}, or package.module:function")
    return import_function("rewards.function", name)


def _is_calculation(result: Any, text: str = "") -> bool:
    """Returns whether a number, also in a set, a tuple or on the right of an equation, is written as a sum, as a
    product of numbers or as a quotient without remainder. Other fractions, percentages, powers and scientific notation
    are results.

    Args:
        result: the parsed result, in which math-verify leaves sums and products unevaluated.
        text: its source, as math-verify evaluates fractions of LaTeX.
    """
    from sympy import Add, Equality, FiniteSet, Integer, Mul, Pow, Tuple

    if isinstance(result, Equality):
        return _is_calculation(result.rhs, text)
    if isinstance(result, FiniteSet | Tuple):
        return any(_is_calculation(part) for part in result.args)
    if isinstance(result, Integer):
        return QUOTIENT.fullmatch(text.strip()) is not None
    if not isinstance(result, Add | Mul) or not result.doit().is_Number:
        return False
    factors = [factor for factor in Mul.make_args(result) if factor not in (1, -1)]
    powers = [factor for factor in factors if isinstance(factor, Pow) and factor.base.is_Number]
    tens = [power for power in powers if power.base == 10 and power.exp.is_Integer]
    whole = [power for power in powers if power.exp.is_Integer and power.exp > 0]
    numbers = [factor for factor in factors if factor.is_Number]
    is_scientific = len(numbers) == 1 and len(whole) == len(tens) == 1
    divides = any(power.exp == -1 and power.base != 10 for power in powers)
    return bool(
        result.has(Add)
        or (len(numbers) + len(whole) > 1 and not is_scientific)
        or (divides and result.doit().is_Integer)
    )


def _last_number(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
