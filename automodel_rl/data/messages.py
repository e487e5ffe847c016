"""Chats: messages, available tools, and which turns are trained."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from automodel_rl.config.data import Column
from automodel_rl.data.characters import check_characters
from automodel_rl.errors import InputError

Message = dict[str, Any]

MEDIA_PARTS: dict[str, Column] = {"image": "images", "video": "videos", "audio": "audio"}
"""Types of media parts, each with the column that may list its files."""

PARTS = ("text", *MEDIA_PARTS)
"""Types of content parts."""


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
        messages: checked by `checked_messages`.
        tools: JSON schemas of the tools that the assistant may call.
        start: index of the first message after the prompt. Turns of the prompt are not trained.
    """

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()
    start: int = 0

    @functools.cached_property
    def turns(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]

    @functools.cached_property
    def trained(self) -> list[int]:
        """Indices of trained turns: those after the prompt, except turns with weight 0."""
        return [turn for turn in self.turns if turn >= self.start and self.messages[turn].get("weight") != 0]

    @functools.cached_property
    def last_of_user(self) -> int:
        """Index of the user's last message; -1 if there is none."""
        return max((place for place, message in enumerate(self.messages) if message["role"] == "user"), default=-1)

    def until(self, end: int) -> "Chat":
        """Returns the chat up to but excluding the message at `end`."""
        return dataclasses.replace(self, messages=self.messages[:end])


def media_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns all image, video and audio parts of messages, in order."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    return [part for part in parts if isinstance(part, dict) and part.get("type") in MEDIA_PARTS]


def checked_messages(value: Any, column: str, where: str, role: str | None = None) -> list[Message]:
    """Validates the messages of a record and drops keys with null values, which datasets fill in for keys that only
    other objects of the column have.

    Args:
        value: a list of messages, or a text, which becomes one message.
        column: the package's own name of the column.
        where: location of the record.
        role: role of a text's message; None if texts are not allowed.
    """
    check_characters(value, column, where)
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if isinstance(value, list) and all(isinstance(m, dict) and {"from", "value"} <= m.keys() for m in value):
        value = [_from_sharegpt(message, turn, where) for turn, message in enumerate(value)]
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        text = "" if role is None else "a text or "
        raise InputError(f"{where}: {column} must be {text}a list of objects with role and content")
    messages = [{k: _without_nulls(v) for k, v in m.items() if v is not None} for m in value]
    for turn, message in enumerate(messages):
        _check_message(message, turn, where)
    # Templates render null as None, or raise. OpenAI's messages have a null content beside calls.
    return [message if "content" in message else {**message, "content": ""} for message in messages]


SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    **{role: role for role in ("system", "user", "assistant", "tool")},
}
"""Roles by their names in ShareGPT and similar datasets."""


def _from_sharegpt(message: Message, turn: int, where: str) -> Message:
    """Converts a ShareGPT message with `from` and `value` to role and content."""
    if message["from"] not in SHAREGPT_ROLES:
        raise InputError(
            f"{where}: turn {turn} is from {message['from']!r}: use one of {', '.join(SHAREGPT_ROLES)}, or messages "
            "with role and content"
        )
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": SHAREGPT_ROLES[message["from"]], "content": message["value"], **rest}


def _check_message(message: Message, turn: int, where: str) -> None:
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str | list) and not (content is None and calls):
        shown = json.dumps(message, default=repr)[:80]
        raise InputError(f"{where}: turn {turn} has no text in content, only {shown}: add a text, or remove the turn")
    for part in content if isinstance(content, list) else ():
        _check_part(part, where)
    if calls and not (isinstance(calls, list) and all(_name(call) for call in calls)):
        raise InputError(
            f"{where}: tool_calls of turn {turn} must be a list of objects with a function that has name and arguments"
        )
    for call in calls or ():
        _check_arguments(call, turn, where)
    for key in FOREIGN_WEIGHT_KEYS & message.keys():
        raise InputError(
            f"{where}: turn {turn} has {key}: {json.dumps(message[key], default=repr)[:40]}, which other tools read: "
            f"set weight: 0 for a turn that is not trained, and remove {key}, or skip it with ignore: [{key}]"
        )
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise InputError(f"{where}: weight of turn {turn} is {weight!r}: use 0 (not trained) or 1, or remove it")
    if weight and message["role"] != "assistant":
        raise InputError(
            f"{where}: weight of turn {turn} is {weight}, but turns of role {message['role']} are never trained: "
            "remove it"
        )


FOREIGN_WEIGHT_KEYS = {"train", "training", "trainable", "train_detail", "loss", "loss_mask", "loss_weight", "masked"}
"""Message keys that select trained turns in other tools, such as Axolotl, verl and ms-swift."""


def _check_arguments(call: dict[str, Any], turn: int, where: str) -> None:
    """Raises InputError for arguments with which no tool could be called, such as truncated JSON."""
    function = function_of(call)
    arguments = function.get("arguments", {})
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = None
    check_characters(value, f"a call of {function['name']!r} in turn {turn}", where)
    if not isinstance(value, dict):
        raise InputError(
            f"{where}: arguments of the call of {function['name']!r} in turn {turn} are not a JSON object, but "
            f"{json.dumps(arguments, default=repr)[-60:]}: use a complete one, {{}} for none, or remove the record"
        )


def _check_part(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in PARTS:
        raise InputError(f"{where}: a part of content has type {kind!r}: use parts of type {', '.join(PARTS)} only")
    if kind == "text" and not isinstance(part.get("text"), str):
        raise InputError(f"{where}: a part of type text has {part.get('text')!r:.40} for text: use a text")


def checked_tools(value: Any, name: str, where: str) -> tuple[dict[str, Any], ...]:
    """Validates the tools of a record, a list of JSON schemas, JSON of such a list, or None. Drops keys with null
    values, except in JSON texts. `name` is the column's name in the data."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InputError(f"{where}: tools is a text but not JSON ({error}): use a list of JSON schemas") from None
    else:
        value = _without_nulls(value)
    if not value:
        return ()
    if not isinstance(value, list) or not all(_name(tool) for tool in value):
        raise InputError(
            f"{where}: tools must be a list of JSON schemas with a name, or JSON of one, not "
            f"{json.dumps(value, default=repr)[:80]}: change it, name another column in columns: {{tools: NAME}}, or "
            f"skip it with ignore: [{name}]"
        )
    check_characters(value, name, where)
    return tuple(value)


def _without_nulls(value: Any) -> Any:
    """Returns a copy without keys whose value is null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns the object that holds the name of a tool or tool call: its `function`, or the tool or call itself."""
    return tool.get("function", tool)


def _name(tool: Any) -> str | None:
    function = function_of(tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
