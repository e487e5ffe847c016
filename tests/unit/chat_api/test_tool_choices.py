"""Choices of tools, results of calls and stop texts, by the APIs of OpenAI and Anthropic."""

from collections.abc import Callable
from typing import Any

import pytest

from automodel_rl.chat_api import anthropic, chat_completions, responses
from automodel_rl.chat_api.exchange import ChatAnswer, ChatCall
from automodel_rl.errors import InputError

Read = Callable[[dict[str, Any]], ChatCall]

SCHEMA = {"type": "object", "properties": {}}


def of_chat(results: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    calls = [{"id": one, "type": "function", "function": {"name": one, "arguments": "{}"}} for one in ("add", "mul")]
    told = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in results]
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages = [{"role": "user", "content": "Ask."}, {"role": "assistant", "tool_calls": calls}, *told]
    return {"messages": messages, "tools": tools, **more}


def of_responses(results: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    calls = [{"type": "function_call", "call_id": one, "name": one, "arguments": "{}"} for one in ("add", "mul")]
    told = [{"type": "function_call_output", "call_id": name, "output": text} for name, text in results]
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]
    return {"input": [{"role": "user", "content": "Ask."}, *calls, *told], "tools": tools, **more}


def of_anthropic(results: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": one, "name": one, "input": {}} for one in ("add", "mul")]
    told = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results]
    messages = [
        {"role": "user", "content": "Ask."},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [*told, {"type": "text", "text": "Go on."}]},
    ]
    return {"messages": messages, "tools": [{"name": "add", "input_schema": SCHEMA}], "max_tokens": 9, **more}


APIS = pytest.mark.parametrize(
    ("read", "body"),
    [(chat_completions.read, of_chat), (responses.read, of_responses), (anthropic.read, of_anthropic)],
    ids=["chat", "responses", "anthropic"],
)
GOOD = [("add", "3"), ("mul", "2")]


@APIS
def test_results_come_in_the_order_of_their_calls(read: Read, body: Any) -> None:
    for results in (GOOD, GOOD[::-1]):
        told = [message["content"] for message in read(body(results)).messages if message["role"] == "tool"]
        assert told == ["3", "2"]


@APIS
@pytest.mark.parametrize(
    ("results", "why"),
    [
        ([("add", "3")], "the call 'mul' has no result"),
        ([("add", "3"), ("other", "2")], "'other' is not the id of a preceding call"),
        ([("add", "3"), ("", "2")], "'' is not the id of a preceding call"),
        ([("add", "3"), ("mul", "2"), ("add", "4")], "the call 'add' has several results"),
    ],
)
def test_results_that_fit_no_call_are_refused(read: Read, body: Any, results: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read(body(results))


def test_calls_that_nothing_answers_are_refused() -> None:
    asked = of_anthropic([])
    with pytest.raises(InputError, match="messages.1: has calls without results"):
        anthropic.read(asked)


@APIS
def test_no_tool_is_shown_if_none_may_be_chosen(read: Read, body: Any) -> None:
    assert len(read(body(GOOD)).tools) == 1
    choice: Any = {"type": "none"} if body is of_anthropic else "none"
    call = read(body(GOOD, tool_choice=choice))
    assert (call.tools, call.overridden) == ((), {})


@APIS
def test_one_call_may_be_asked_for(read: Read, body: Any) -> None:
    one: Any = {"parallel_tool_calls": False}
    if body is of_anthropic:
        one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert (read(body(GOOD)).is_parallel, read(body(GOOD, **one)).is_parallel) == (True, False)


def test_enforced_formats_are_refused_by_name() -> None:
    anthropic.read(of_anthropic(GOOD, output_config={"effort": "low"}))
    for output in ({"format": {"type": "json_schema", "schema": SCHEMA}}, {"effort": "low", "task_budget": 5}):
        with pytest.raises(InputError, match="output_config.(format|task_budget) is not supported"):
            anthropic.read(of_anthropic(GOOD, output_config=output))
    with pytest.raises(InputError, match="output_config is not supported"):
        chat_completions.read(of_chat(GOOD, output_config={"format": {}}))


def test_a_stop_text_is_told() -> None:
    call = anthropic.read(of_anthropic(GOOD))
    answer = ChatAnswer("1", "any", "four ", stop_text="END")
    reply = anthropic.reply(answer, call)
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")
    assert '"stop_sequence": "END"' in "".join(anthropic.events(answer, call))
