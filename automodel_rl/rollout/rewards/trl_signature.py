"""Calls reward functions written for TRL, `(prompts, completions, **kwargs)`, with lists of completions and records."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

KEYWORDS = inspect.Parameter.VAR_KEYWORD


def has_trl_signature(function: Callable[..., Any]) -> bool:
    """Whether a function takes lists by name, as TRL passes them: `prompts`, or `completions` with columns as keyword
    arguments. A function `(completions, examples)` is called with records."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or one written in C
        return False
    names = [*parameters]
    takes_columns = any(parameter.kind is KEYWORDS for parameter in parameters.values())
    return "prompts" in names or (names[:1] == ["completions"] and takes_columns and names[1:2] != ["examples"])


def from_trl(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Returns a function of lists of completions and records. Completions are messages where prompts are, as in TRL,
    and every column is a list. None means that a reward does not apply, and adds nothing."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is KEYWORDS for parameter in parameters.values())

    def called(completions: list[str], examples: list[dict[str, Any]], **options: Any) -> list[Any]:
        prompts = [example.get("prompt") for example in examples]
        columns = {name: [example.get(name) for example in examples] for example in examples for name in example}
        lists: dict[str, Any] = {
            **columns,
            "prompts": prompts,
            "completions": [
                [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
                for prompt, text in zip(prompts, completions, strict=True)
            ],
        }
        scores = function(**{name: one for name, one in lists.items() if takes_all or name in parameters} | options)
        if inspect.isawaitable(scores):
            scores = asyncio.run(_awaited(scores))
        return [0.0 if score is None else score for score in scores]

    own = [one for one in parameters.values() if one.default is not one.empty or one.kind is KEYWORDS]
    first = [*inspect.signature(called).parameters.values()][:2]
    options = [one if one.kind is KEYWORDS else one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
    called.__signature__ = inspect.Signature([*first, *options])  # type: ignore[attr-defined]
    called.__wrapped__ = function  # type: ignore[attr-defined]  # so that errors name its lines
    return called


async def _awaited(scores: Any) -> Any:
    return await scores
