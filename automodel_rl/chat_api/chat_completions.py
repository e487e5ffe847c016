"""OpenAI's Chat Completions API: requests as calls, and answers as JSON or as events."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from automodel_rl.chat_api.exchange import ChatAnswer, ChatCall, event
from automodel_rl.chat_api.messages import checked_messages, checked_tools, with_results_in_order
from automodel_rl.chat_api.refusals import allows_parallel, check_keys, choice_of, most_tokens, overridden, stop_texts

SUPPORTED_KEYS = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens", "stop"),
    *("stream", "stream_options"),
)
"""Request keys that are read."""


def read(body: Mapping[str, Any]) -> ChatCall:
    """Parses a request. Raises InputError if it asks for something that is not served."""
    check_keys(body, SUPPORTED_KEYS)
    return ChatCall(
        with_results_in_order(checked_messages(body.get("messages"))),
        checked_tools(body.get("tools"), choice_of(body)),
        most_tokens(body, "max_completion_tokens", "max_tokens"),
        stop_texts(body, "stop"),
        bool(body.get("stream")),
        bool((body.get("stream_options") or {}).get("include_usage")),
        is_parallel=allows_parallel(body),
        overridden=overridden(body),
    )


def reply(answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    """Formats a chat completion as JSON, with one answer per choice."""
    choices = [
        {"index": index, "message": answer.message, "finish_reason": answer.finish_reason, "logprobs": None}
        | {**answer.extras}
        for index, answer in enumerate(answers)
    ]
    return {**_head(answers[0], "chat.completion"), "choices": choices, "usage": _usage(answers)}


def events(answers: Sequence[ChatAnswer], with_usage: bool) -> Iterator[str]:
    """Yields a chat completion as server-sent events: for each choice the whole turn in one chunk, then its end.
    `with_usage` adds a final chunk with token counts."""
    head = _head(answers[0], "chat.completion.chunk")
    for index, answer in enumerate(answers):
        delta = answer.message
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        whole = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None} | {**answer.extras}
        end = {"index": index, "delta": {}, "finish_reason": answer.finish_reason}
        yield event({**head, "choices": [whole]})
        yield event({**head, "choices": [end]})
    if with_usage:
        yield event({**head, "choices": [], "usage": _usage(answers)})
    yield event("[DONE]")


def _head(answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _usage(answers: Sequence[ChatAnswer]) -> dict[str, int]:
    asked, written = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}
