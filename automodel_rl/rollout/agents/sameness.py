"""Compares messages that an agent sends again with those of its history.

Agents rewrite messages: reordered JSON, contents split in parts, thoughts dropped, new ids. With exact equality nearly
every call would begin a new history.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from automodel_rl.chat_api.exchange import Message

Calls = tuple[tuple[str, str], ...]
"""Tool calls: name and arguments, as JSON of one form."""


@dataclass(frozen=True)
class NormalizedMessage:
    """A sent or sampled message in the form for comparison.

    Attributes:
        texts: possible contents: for a sampled turn its content and the whole turn.
        calls: without ids, as some agents make their own.
        reasoning: of a sampled turn; they may be dropped when it is sent again.
    """

    role: str
    texts: tuple[str, ...]
    calls: Calls = ()
    reasoning: str = ""
    is_sampled: bool = False

    def is_same(self, message: Message) -> bool:
        """Compares with a message checked by `chat_api.messages.checked_messages`. Other keys are ignored."""
        if message["role"] != self.role or calls_of(message) != self.calls:
            return False
        text = message["content"]
        if not self.is_sampled:
            return text in self.texts
        thoughts = message.get("reasoning_content", "").strip()
        return text.strip() in self.texts and thoughts in ("", self.reasoning)


def normalized(message: Message) -> NormalizedMessage:
    return NormalizedMessage(message["role"], (message["content"],), calls_of(message))


def sampled(content: str, text: str, reasoning: str, calls: Calls) -> NormalizedMessage:
    """Converts a sampled turn: `content` is without thoughts and calls, `text` is the whole turn."""
    return NormalizedMessage("assistant", (content.strip(), text.strip()), calls, reasoning.strip(), is_sampled=True)


def calls_of(message: Message) -> Calls:
    """Returns the calls of a message with parsed arguments. 1 and 1.0 differ."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return tuple((function["name"], json.dumps(function["arguments"], sort_keys=True)) for function in functions)


def tools_digest(tools: Any) -> str:
    """Returns a text that is equal for equal tools."""
    return json.dumps([_sorted(tool) for tool in tools])


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(one) for one in value] if isinstance(value, list) else value
