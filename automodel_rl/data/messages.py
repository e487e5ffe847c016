"""Chats: messages as records have them, the tools that the assistant may call, and which of its turns are trained."""

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any

from automodel_rl.errors import InputError

Message = dict[str, Any]

PARTS = ("text", "image")
"""Types of the parts that a content may be a list of."""


@dataclass(frozen=True)
class Chat:
    """Messages in order.

    Attributes:
        messages: checked by `checked_messages`.
        tools: JSON schemas of what the assistant may call.
        start: message from which on turns are trained; those before are a prompt.
    """

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()
    start: int = 0

    @functools.cached_property
    def turns(self) -> list[int]:
        """Places of the assistant's messages."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]

    @functools.cached_property
    def trained(self) -> list[int]:
        """Of the turns those that count: after the prompt, and without weight 0."""
        return [turn for turn in self.turns if turn >= self.start and self.messages[turn].get("weight") != 0]

    @functools.cached_property
    def last_of_user(self) -> int:
        """Place of the user's last message; -1 without one."""
        return max((place for place, message in enumerate(self.messages) if message["role"] == "user"), default=-1)

    def until(self, end: int) -> "Chat":
        """The messages before one."""
        return dataclasses.replace(self, messages=self.messages[:end])


def checked_messages(value: Any, column: str, where: str, role: str | None = None) -> list[Message]:
    """Messages without keys that are null, which datasets give to all objects of a column if one has them.

    Args:
        value: of the column; a text is one message by `role`, where texts are allowed.
        column: by the package's own name.
        where: in the data, for messages of errors.
        role: of a text; None where texts are not allowed.

    Raises:
        InputError: they are none, or one has something that no chat has.
    """
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        text = "" if role is None else "a text or "
        raise InputError(f"{where}: {column} must be {text}a list of objects with role and content")
    # A template may ask whether there is no content, so that stays.
    messages = [{k: _without_nulls(v) for k, v in m.items() if v is not None or k == "content"} for m in value]
    for turn, message in enumerate(messages):
        _check_message(message, turn, where)
    return messages


def _check_message(message: Message, turn: int, where: str) -> None:
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str | list) and not (content is None and calls):
        shown = json.dumps(message, default=repr)[:80]
        raise InputError(f"{where}: turn {turn} has no text in content, only {shown}")
    for part in content if isinstance(content, list) else ():
        _check_part(part, where)
    if calls and not (isinstance(calls, list) and all(_name(call) for call in calls)):
        raise InputError(
            f"{where}: tool_calls of turn {turn} must be a list of objects with a function that has name and arguments"
        )
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise InputError(f"{where}: weight of turn {turn} is {weight!r}: give 0 (not trained) or 1, or leave it out")
    if weight and message["role"] != "assistant":
        raise InputError(
            f"{where}: weight of turn {turn} is {weight}, and turns of role {message['role']} are never trained: "
            "leave it out"
        )


def _check_part(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in PARTS:
        raise InputError(f"{where}: a part of content has type {kind!r}: use parts of type text and image only")
    if kind == "text" and not isinstance(part.get("text"), str):
        raise InputError(f"{where}: a part of type text has {part.get('text')!r:.40} for text: give a text")


def checked_tools(value: Any, name: str, where: str) -> tuple[dict[str, Any], ...]:
    """Tools of a record: a list of JSON schemas without keys that are null, or JSON of one as it is; none where there
    are none.

    Args:
        value: of the column.
        name: of the column in the data.
        where: in the data, for messages of errors.

    Raises:
        InputError: they are something else.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InputError(f"{where}: tools is a text and not JSON ({error}): give a list of JSON schemas") from None
    else:
        value = _without_nulls(value)
    if not value:
        return ()
    if not isinstance(value, list) or not all(_name(tool) for tool in value):
        raise InputError(
            f"{where}: tools must be a list of JSON schemas with a name, or JSON of one, not "
            f"{json.dumps(value, default=repr)[:80]}: change it, name another column in columns: {{tools: NAME}}, or "
            f"pass it over with ignore: [{name}]"
        )
    return tuple(value)


def _without_nulls(value: Any) -> Any:
    """A value without keys that are null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    """What has the name of a tool or of a call of it: its `function`, or itself."""
    return tool.get("function", tool)


def _name(tool: Any) -> str | None:
    function = function_of(tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
