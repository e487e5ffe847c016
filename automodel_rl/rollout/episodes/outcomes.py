"""Checks results of environments, in the environment's own process: only plain data reach the trainer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from automodel_rl.rollout.episodes.protocol import Message, Outcome

ROLES = ("user", "tool", "system")

MAX_CHARACTERS = 1_000_000


def checked_messages(value: Any, method: str) -> list[Message]:
    """Converts messages to plain data. Raises TypeError if they are invalid."""
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise TypeError(f"{method} returned {value!r:.80}, which is not a list of messages")
    messages = []
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise TypeError(f"{method} returned the message {message!r:.80}, whose role is not user, tool or system")
        content = message.get("content")
        if not isinstance(content, str):
            raise TypeError(f"{method} returned a message whose content is {content!r:.80}, which is not a string")
        if len(content) > MAX_CHARACTERS:
            raise TypeError(f"{method} returned a message of {len(content)} characters, more than {MAX_CHARACTERS}")
        texts = {str(key): part for key, part in message.items() if isinstance(part, str)}
        messages.append(texts)
    return messages


def checked_outcome(value: Any) -> Outcome:
    """Converts an outcome to plain data. Raises TypeError if it is invalid, or a number is not finite."""
    if not isinstance(value, Outcome):
        raise TypeError(f"step returned {value!r:.80}, which is not an Outcome")
    return Outcome(
        checked_messages(value.messages, "step"),
        bool(value.done),
        _number(value.reward, "the reward"),
        {str(name): _number(metric, f"the metric {name}") for name, metric in value.metrics.items()},
    )


def explain(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _number(value: Any, what: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise TypeError(f"step returned {value!r:.80} for {what}, which is not a finite number")
    return number
