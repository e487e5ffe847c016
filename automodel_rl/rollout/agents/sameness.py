"""Whether a message that an agent sends again is the one that it stands for.

Agents write messages anew: JSON in another order, contents in parts, thoughts left out, ids of their own. With exact
equality nearly every call would begin a new history.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from automodel_rl.chat_api.exchange import Message

Calls = tuple[tuple[str, str], ...]
"""Calls of tools: of each the name and its arguments, as JSON of one form."""


@dataclass(frozen=True)
class Told:
    """A message that an agent has sent, or that was sampled, in the form in which it is compared.

    Attributes:
        role: its role.
        texts: the texts that its content may have: of a sampled turn its content and the whole turn.
        calls: its calls. Ids are left out, for some agents make ids of their own.
        thoughts: thoughts of a sampled turn; they may be left out.
        is_sampled: whether the model wrote it.
    """

    role: str
    texts: tuple[str, ...]
    calls: Calls = ()
    thoughts: str = ""
    is_sampled: bool = False

    def is_same(self, message: Message) -> bool:
        """Whether a message that was sent stands for this one. All other keys are ignored.

        Args:
            message: the message, checked by `chat_api.messages.checked_messages`.
        """
        if message["role"] != self.role or calls_of(message) != self.calls:
            return False
        text = message["content"]
        if not self.is_sampled:
            return text in self.texts
        thoughts = message.get("reasoning_content", "").strip()
        return text.strip() in self.texts and thoughts in ("", self.thoughts)


def told(message: Message) -> Told:
    """A message that an agent sent.

    Args:
        message: the message.
    """
    return Told(message["role"], (message["content"],), calls_of(message))


def sampled(content: str, text: str, thoughts: str, calls: Calls) -> Told:
    """A turn that the model wrote.

    Args:
        content: the turn without thoughts and calls.
        text: the whole turn.
        thoughts: its thoughts.
        calls: its calls.
    """
    return Told("assistant", (content.strip(), text.strip()), calls, thoughts.strip(), is_sampled=True)


def calls_of(message: Message) -> Calls:
    """The calls of a message, whose arguments are values of JSON. 1 and 1.0 differ.

    Args:
        message: the message.
    """
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return tuple((function["name"], json.dumps(function["arguments"], sort_keys=True)) for function in functions)


def tools_digest(tools: Any) -> str:
    """Tools in a form that is equal for equal tools.

    Args:
        tools: JSON schemas, in order.
    """
    return json.dumps([_sorted(tool) for tool in tools])


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(one) for one in value] if isinstance(value, list) else value
