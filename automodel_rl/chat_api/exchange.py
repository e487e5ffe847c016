"""A request for an assistant turn, and its answer, independent of the API."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
"""A message in the form of OpenAI's chat API, with text contents, and objects as call arguments."""


@dataclass(frozen=True)
class ChatCall:
    """A parsed request.

    Attributes:
        tools: JSON schemas of the tools, in the form of OpenAI's chat API.
        max_tokens: None for as many as there is room for.
        stop: texts that end the answer.
        streams: whether to send the answer as events.
        with_usage: whether the events of a chat completion end with token counts.
        with_reasoning: whether to send reasoning, for APIs that send it only on request.
        is_parallel: whether an answer may have several tool calls.
        previous: id of the answer that the messages follow; empty if the whole conversation is sent.
        overridden: sampling settings in the request, by name, which the run overrides.
    """

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    streams: bool = False
    with_usage: bool = False
    with_reasoning: bool = True
    is_parallel: bool = True
    previous: str = ""
    overridden: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolCall:
    """A tool call. `arguments` is a JSON value, which should be an object."""

    id: str
    name: str
    arguments: Any

    @property
    def as_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class ChatAnswer:
    """An assistant turn.

    Attributes:
        id: unique to this answer.
        model: the model name in the request.
        content: the text, without reasoning and tool calls.
        is_truncated: whether the turn ended at the token limit.
        stop_text: the requested stop text that ended it; empty if none did.
        extras: further keys of the choice in a chat completion, such as `logprobs`.
        created: Unix time in seconds.
    """

    id: str
    model: str
    content: str = ""
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    is_truncated: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict)
    stop_text: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        if self.is_truncated:
            return "length"
        return "tool_calls" if self.calls else "stop"

    @property
    def message(self) -> Message:
        """The turn as a message, with call arguments encoded as JSON."""
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
    """Formats a server-sent event. `data` other than text is encoded as JSON; `name` is for APIs with named events."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"
