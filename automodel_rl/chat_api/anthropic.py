"""Anthropic's Messages API: requests as calls, and answers as JSON or as events."""

import json
from collections.abc import Iterator
from typing import Any

from automodel_rl.chat_api.exchange import ChatAnswer, ChatCall, Message, event
from automodel_rl.chat_api.messages import call_of, checked_tools, text_of, with_results_in_order
from automodel_rl.chat_api.refusals import allows_parallel, check_keys, choice_of, most_tokens, overridden, stop_texts
from automodel_rl.errors import InputError

SUPPORTED_KEYS = (
    *("messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "thinking"),
    "output_config",
)
"""Request keys that are read."""


def read(body: dict[str, Any], *, counts_only: bool = False) -> ChatCall:
    """Parses a request.

    Args:
        counts_only: whether this is a token-count request, which needs no `max_tokens`.

    Raises:
        InputError: it asks for something that is not served.
    """
    check_keys(body, SUPPORTED_KEYS)
    _check_output(body.get("output_config"))
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise InputError("messages: must be a list of messages: send at least one")
    most = most_tokens(body, "max_tokens")
    if most is None and not counts_only:
        raise InputError("max_tokens: is missing: send the maximum number of tokens")
    system = text_of(body.get("system"), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(given):
        messages += _messages(message, f"messages.{place}")
    if messages[-1]["role"] == "assistant":
        raise InputError("messages: end with an assistant message, which cannot be continued: end with a user message")
    thinking = body.get("thinking")
    return ChatCall(
        with_results_in_order(messages),
        checked_tools([_as_function(tool) for tool in body.get("tools") or []], choice_of(body)),
        most,
        stop_texts(body, "stop_sequences"),
        bool(body.get("stream")),
        with_reasoning=isinstance(thinking, dict) and thinking.get("type") != "disabled",
        is_parallel=allows_parallel(body),
        overridden=overridden(body),
    )


def _check_output(given: Any) -> None:
    """Raises InputError if an output format is to be enforced. The effort is ignored."""
    if not isinstance(given or {}, dict):
        raise InputError(f"output_config: is {given!r:.80}: send an object")
    other = next((key for key, value in (given or {}).items() if key != "effort" and value is not None), None)
    if other is not None:
        raise InputError(f"output_config.{other} is not supported: remove it")


def _as_function(tool: Any) -> Any:
    """Converts a tool to the form of chat completions."""
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        return tool
    known = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": known}


def _messages(message: Any, where: str) -> list[Message]:
    """Converts a message: one message per tool result in it, and one for its text."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise InputError(f"{where}: is {message!r:.80}: send an object with the role user or assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(blocks, list):
        raise InputError(f"{where}: content is {content!r:.80}: send text or blocks")
    results, texts, thoughts, calls = [], [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        match kind:
            case "text":
                texts.append(text_of([block], where))
            case "thinking" if role == "assistant":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking" if role == "assistant":
                pass
            case "tool_use" if role == "assistant":
                calls.append(call_of(block.get("id"), block.get("name"), block.get("input"), where))
            case "tool_result" if role == "user":
                results.append(_result(block, where))
            case _:
                raise InputError(
                    f"{where}: a block of type {kind} is not supported: send text, tool_use and tool_result"
                )
    told: Message = {"role": role, "content": "".join(texts)}
    if thoughts:
        told["reasoning_content"] = "".join(thoughts)
    if calls:
        told["tool_calls"] = calls
    return [*results, *([told] if texts or not results else [])]


def _result(block: dict[str, Any], where: str) -> Message:
    content = block.get("content")
    text = text_of(content, where) if content is None or isinstance(content, str | list) else json.dumps(content)
    return {"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id") or "")}


def reply(answer: ChatAnswer, call: ChatCall) -> dict[str, Any]:
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}
    end = {**_end(answer), "usage": usage}
    return {**_head(answer), "content": _blocks(answer, call), **end}


def events(answer: ChatAnswer, call: ChatCall) -> Iterator[str]:
    """Yields a message as server-sent events. Each text and each call's arguments are one delta."""
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    begun = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    steps: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(_blocks(answer, call)):
        empty, *deltas = _parts_of(block)
        steps.append({"type": "content_block_start", "index": index, "content_block": empty})
        steps += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        steps.append({"type": "content_block_stop", "index": index})
    steps.append({"type": "message_delta", "delta": _end(answer), "usage": {"output_tokens": answer.completion_tokens}})
    steps.append({"type": "message_stop"})
    for step in steps:
        yield event(step, step["type"])


def _parts_of(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns an empty block, and the deltas that fill it."""
    match block["type"]:
        case "text":
            return [{**block, "text": ""}, {"type": "text_delta", "text": block["text"]}]
        case "thinking":
            signed = {"type": "signature_delta", "signature": block["signature"]}
            return [
                {**block, "thinking": "", "signature": ""},
                {"type": "thinking_delta", "thinking": block["thinking"]},
                signed,
            ]
    added = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
    return [{**block, "input": {}}, added]


def _blocks(answer: ChatAnswer, call: ChatCall) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning and call.with_reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": answer.id})
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    for one in answer.calls:
        given = one.arguments if isinstance(one.arguments, dict) else {"arguments": one.arguments}
        blocks.append({"type": "tool_use", "id": one.id, "name": one.name, "input": given})
    return blocks


def _end(answer: ChatAnswer) -> dict[str, str | None]:
    if answer.is_truncated:
        reason = "max_tokens"
    elif answer.stop_text:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if answer.calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": answer.stop_text if reason == "stop_sequence" else None}


def _head(answer: ChatAnswer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}
