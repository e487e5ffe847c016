"""Normalizes clients' messages: contents become texts, and call arguments objects."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from automodel_rl.chat_api.exchange import Message
from automodel_rl.chat_api.values import check_depth
from automodel_rl.errors import InputError

ROLES = {"developer": "system", "function": "tool", **{role: role for role in ("system", "user", "assistant", "tool")}}
"""Roles that clients send, mapped to those that chat templates know."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are text."""


def checked_messages(value: Any) -> list[Message]:
    """Checks and normalizes the `messages` of a chat request.

    Raises:
        InputError: a message is invalid, or has something that is not served, such as an image.
    """
    if not isinstance(value, list) or not value:
        raise InputError("messages: must be a list of messages: send at least one")
    return [_checked(message, place) for place, message in enumerate(value)]


def _checked(given: Any, place: int) -> Message:
    role = ROLES.get(given.get("role", "")) if isinstance(given, dict) else None
    if role is None:
        raise InputError(f"messages.{place}: is {given!r:.80}: send an object with a role of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": text_of(given.get("content"), f"messages.{place}")}
    thoughts = given.get("reasoning_content") or given.get("reasoning")
    if role == "assistant" and isinstance(thoughts, str):
        message["reasoning_content"] = thoughts
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = [_call(call, f"messages.{place}") for call in given["tool_calls"]]
    elif role == "assistant" and given.get("function_call"):
        raise InputError(f"messages.{place}: function_call is not supported: send tool_calls")
    if role == "tool":
        message |= {key: given[key] for key in ("name", "tool_call_id") if isinstance(given.get(key), str)}
    return message


def text_of(content: Any, where: str) -> str:
    """Returns the text of a content: None, a string, or a list of text parts.

    Args:
        where: its path in the request, for errors.

    Raises:
        InputError: it contains something else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InputError(f"{where}: content is {content!r:.80}: send text or text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "refusal":
            texts.append(str(part.get("refusal") or ""))
        elif kind in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise InputError(f"{where}: a part of type {kind} is not supported: send text only")
    return "".join(texts)


def call_of(identity: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Builds a message's tool call.

    Args:
        identity: the client's id of the call.
        arguments: an object, or JSON text.
        where: its path in the request, for errors.

    Raises:
        InputError: it has no name, or its arguments are not valid JSON.
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: a call has no tool name: send its function's name")
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) or arguments is None else arguments
    except (ValueError, RecursionError):
        raise InputError(f"{where}: the arguments of a call of {name} are not valid JSON: {arguments!r:.80}") from None
    check_depth(value, f"{where}: the arguments of a call of {name}")
    function = {"name": name, "arguments": value}
    return {"id": str(identity or ""), "type": "function", "function": function}


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise InputError(f"{where}: a call is {given!r:.80}: send an object with a function")
    return call_of(given.get("id"), function.get("name"), function.get("arguments"), where)


def checked_tools(value: Any, choice: Any = None) -> tuple[dict[str, Any], ...]:
    """Returns the tools of a chat request that the model sees: none if the tool choice is "none".

    Raises:
        InputError: a tool is not a function.
    """
    if not isinstance(value or [], list):
        raise InputError(f"tools: are {value!r:.80}: send a list")
    tools = []
    for place, tool in enumerate(value or []):
        kind = tool.get("type", "function") if isinstance(tool, dict) else type(tool).__name__
        function = tool.get("function") if isinstance(tool, dict) else None
        if kind != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(f"tools.{place}: a tool of type {kind} is not supported: send functions with a name")
        check_depth(function, f"tools.{place}")
        tools.append({"type": "function", "function": _without_nulls(function)})
    return () if choice == "none" else tuple(tools)


def _without_nulls(function: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in function.items() if value is not None}


def with_results_in_order(messages: Sequence[Message]) -> list[Message]:
    """Sorts the results of each turn's tool calls by the order of the calls, as most chat templates write no ids.

    The calls of the last turn may still lack results.

    Raises:
        InputError: a result matches no call or duplicates another, or a call has none.
    """
    ordered: list[Message] = []
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            if place == 0 or messages[place - 1]["role"] != "tool":
                ordered += _results(messages, place)
        else:
            ordered.append(message)
            if message.get("tool_calls") and place + 1 < len(messages) and messages[place + 1]["role"] != "tool":
                raise InputError(f"messages.{place}: has calls without results: send one for each call")
    return ordered


def _results(messages: Sequence[Message], start: int) -> list[Message]:
    """Returns the results from index `start` on, in the order of the calls before them."""
    calls = messages[start - 1].get("tool_calls") or [] if start else []
    results = list(itertools.takewhile(lambda message: message["role"] == "tool", messages[start:]))
    ids, given = [call["id"] for call in calls], [message.get("tool_call_id", "") for message in results]
    for place, one in enumerate(given, start):
        if one not in ids or not one:
            raise InputError(f"messages.{place}: {one!r} is not the id of a preceding call: send the id of its call")
        if given.count(one) > 1:
            raise InputError(f"messages.{place}: the call {one!r} has several results: send one for each call")
    missing = [one for one in ids if one not in given]
    if missing or len(set(ids)) < len(ids):
        what = f"the call {missing[0]!r} has no result" if missing else "several calls have the same id"
        raise InputError(f"messages.{start - 1}: {what}: send one result for each call, by its id")
    return [results[given.index(one)] for one in ids]


def joined_turns(messages: Sequence[Message]) -> list[Message]:
    """Merges consecutive assistant messages where an API sends a turn's text, reasoning and calls separately."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or message["role"] != "assistant" or last["role"] != "assistant" or _is_over(last, message):
            joined.append({**message})
            continue
        last["content"] += message["content"]
        for key in ("reasoning_content", "tool_calls"):
            if key in message:
                last[key] = (last[key] + message[key]) if key in last else message[key]
    return joined


def _is_over(last: Message, message: Message) -> bool:
    """Whether `message` starts a new turn: within a turn, text comes once, and before the calls."""
    return bool(message["content"] and (last["content"] or last.get("tool_calls")))
