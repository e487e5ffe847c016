"""A request for a turn of the assistant, and the answer, whatever API they came by."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
"""A message in the form of OpenAI's chat API. Contents are texts, and arguments of calls are objects."""


@dataclass(frozen=True)
class ChatCall:
    """What a request asks for.

    Attributes:
        messages: the messages that it sends, in order.
        tools: JSON schemas of the tools, in the form of OpenAI's chat API.
        max_tokens: most tokens of the answer; None for as many as there is room for.
        stop: texts that end the answer.
        streams: whether the answer is sent as events.
        with_usage: whether the events of a chat completion end with the number of tokens.
        with_thoughts: whether the client reads thoughts, of an API that sends them only if asked.
        is_parallel: whether an answer may have several calls.
        previous: the id of the answer that the messages follow; empty if all messages are sent.
        overridden: settings of sampling that the request has, by name.
    """

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    streams: bool = False
    with_usage: bool = False
    with_thoughts: bool = True
    is_parallel: bool = True
    previous: str = ""
    overridden: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. `arguments` is a value of JSON, which should be an object."""

    id: str
    name: str
    arguments: Any

    @property
    def as_json(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class ChatAnswer:
    """A turn of the assistant.

    Attributes:
        id: a name that no other answer has.
        model: the name of the model that the request gave.
        content: the text, without thoughts and calls.
        reasoning: the thoughts.
        calls: the calls of tools.
        is_cut: whether the turn was cut off at the most tokens.
        stop_text: the text of the request that ended it; empty if none did.
        prompt_tokens, completion_tokens: how many the prompt and the turn have.
        extras: further keys of the choice in a chat completion, e.g. `logprobs`.
        created: the time, in seconds since 1970.
    """

    id: str
    model: str
    content: str = ""
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    is_cut: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict)
    stop_text: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why it ended, in the words of OpenAI's chat API."""
        if self.is_cut:
            return "length"
        return "tool_calls" if self.calls else "stop"

    @property
    def message(self) -> Message:
        """It as a message, whose arguments are JSON."""
        message: Message = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.as_json}}
                for call in self.calls
            ]
        return message


def event(data: Any, name: str = "") -> str:
    """A server-sent event.

    Args:
        data: what it carries: a text, or what becomes JSON.
        name: its name, for APIs whose events have one.
    """
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"
