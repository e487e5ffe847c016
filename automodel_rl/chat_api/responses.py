"""OpenAI's Responses API: requests as calls, and answers as JSON or as events."""

import json
from collections.abc import Iterator
from typing import Any

from automodel_rl.chat_api.exchange import ChatAnswer, ChatCall, Message, event
from automodel_rl.chat_api.messages import ROLES, call_of, checked_tools, joined_turns, text_of, with_results_in_order
from automodel_rl.chat_api.refusals import allows_parallel, check_keys, choice_of, most_tokens, overridden
from automodel_rl.errors import InputError

SUPPORTED_KEYS = (
    *("input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "stream"),
    "previous_response_id",
)
"""Request keys that are read."""


def read(body: dict[str, Any]) -> ChatCall:
    """Parses a request. Raises InputError if it asks for something that is not served."""
    text = body.get("text")
    plain = {key: value for key, value in text.items() if key != "verbosity"} if isinstance(text, dict) else text
    check_keys({**body, "text": plain or None}, SUPPORTED_KEYS)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise InputError("input: must be a text or a list of items: send one")
    messages = [message for place, item in enumerate(items) for message in _messages(item, f"input.{place}")]
    instructions = body.get("instructions")
    if instructions:
        messages.insert(0, {"role": "system", "content": text_of(instructions, "instructions")})
    messages, previous = joined_turns(messages), str(body.get("previous_response_id") or "")
    return ChatCall(
        messages if previous else with_results_in_order(messages),
        checked_tools([_nested(tool) for tool in body.get("tools") or []], choice_of(body)),
        most_tokens(body, "max_output_tokens"),
        streams=bool(body.get("stream")),
        is_parallel=allows_parallel(body),
        previous=previous,
        overridden=overridden(body),
    )


def _nested(tool: Any) -> Any:
    """Converts a tool to the nested form of chat completions."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _messages(item: Any, where: str) -> list[Message]:
    """Converts an item to a message, which may be part of a turn, or to none."""
    kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
    match kind:
        case "message" if item.get("role") in ROLES:
            return [{"role": ROLES[item["role"]], "content": text_of(item.get("content"), where)}]
        case "function_call":
            call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"), where)
            return [{"role": "assistant", "content": "", "tool_calls": [call]}]
        case "function_call_output":
            output = item.get("output")
            text = text_of(output, where) if isinstance(output, str | list) else json.dumps(output)
            return [{"role": "tool", "content": text, "tool_call_id": str(item.get("call_id") or "")}]
        case "reasoning":
            thoughts = "".join(str(part.get("text") or "") for part in item.get("content") or [])
            return [{"role": "assistant", "content": "", "reasoning_content": thoughts}] if thoughts else []
    raise InputError(
        f"{where}: an item of type {kind} is not supported: send messages, function calls and their output"
    )


def reply(answer: ChatAnswer, call: ChatCall) -> dict[str, Any]:
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    cut = {"reason": "max_output_tokens"} if answer.is_truncated else None
    state = {"status": "incomplete" if answer.is_truncated else "completed", "incomplete_details": cut, "usage": usage}
    return {**_head(answer, call), **state, "output": _items(answer)}


def events(answer: ChatAnswer, call: ChatCall) -> Iterator[str]:
    """Yields a response as server-sent events. Each text and each call's arguments are one delta."""
    begun = {**_head(answer, call), "status": "in_progress", "incomplete_details": None, "usage": None, "output": []}
    whole = reply(answer, call)
    steps = [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]
    for index, item in enumerate(whole["output"]):
        steps += _events_of(item, index)
    steps.append((f"response.{whole['status']}", {"response": whole}))
    for number, (name, data) in enumerate(steps):
        yield event({"type": name, "sequence_number": number, **data}, name)


def _events_of(item: dict[str, Any], index: int) -> list[tuple[str, dict[str, Any]]]:
    at = {"item_id": item["id"], "output_index": index}
    steps: list[tuple[str, dict[str, Any]]] = []
    empty = {**item, "status": "in_progress"}
    if item["type"] == "message":
        (part,) = item["content"]
        place = {**at, "content_index": 0}
        empty["content"] = []
        steps = [
            ("response.content_part.added", {**place, "part": {**part, "text": ""}}),
            ("response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}),
            ("response.output_text.done", {**place, "text": part["text"], "logprobs": []}),
            ("response.content_part.done", {**place, "part": part}),
        ]
    elif item["type"] == "function_call":
        empty["arguments"] = ""
        steps = [
            ("response.function_call_arguments.delta", {**at, "delta": item["arguments"]}),
            (
                "response.function_call_arguments.done",
                {**at, "name": item["name"], "arguments": item["arguments"]},
            ),
        ]
    added = ("response.output_item.added", {"output_index": index, "item": empty})
    return [added, *steps, ("response.output_item.done", {"output_index": index, "item": item})]


def _items(answer: ChatAnswer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        thoughts = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": thoughts})
    state = {"status": "incomplete" if answer.is_truncated else "completed"}
    if answer.content or not answer.calls:
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "content": [part], **state})
    for number, call in enumerate(answer.calls):
        named = {"call_id": call.id, "name": call.name, "arguments": call.as_json}
        items.append({"id": f"fc_{answer.id}_{number}", "type": "function_call", **named, **state})
    return items


def _head(answer: ChatAnswer, call: ChatCall) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": call.is_parallel,
        "previous_response_id": call.previous or None,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in call.tools],
        "top_p": None,
    }
