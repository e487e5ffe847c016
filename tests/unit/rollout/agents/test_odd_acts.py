"""Acts of one agent that must cost no other one anything: long and deep requests, and half a message."""

import asyncio
import multiprocessing
import os
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.chat_api import chat_completions
from automodel_rl.chat_api.messages import call_of, checked_tools
from automodel_rl.chat_api.values import MAX_DEPTH
from automodel_rl.errors import InputError
from automodel_rl.rollout.agents.episode import TooLongError, _num_characters
from automodel_rl.rollout.agents.protocol import AgentEndpoint, AgentResult
from automodel_rl.rollout.agents.runner import MAX_BYTES, ForkedAgents, FrameReader
from automodel_rl.rollout.http_thread import parsed
from tests.unit.rollout.agents.scripted import Ask, Script, run_case, said, user


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize("depth", [500, 200_000])
def test_what_is_nested_too_deep_is_refused_in_a_line(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    with pytest.raises(InputError) as refused:
        chat_completions.read(parsed(f'{{"messages": {deep}}}'.encode()))
    assert "\n" not in str(refused.value)
    with pytest.raises(InputError):
        call_of("1", "look_up", deep, "messages.0")


def test_tools_have_a_depth() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(MAX_DEPTH)}}
    with pytest.raises(InputError, match=f"tools.0: is nested deeper than {MAX_DEPTH}"):
        checked_tools([tool])
    checked_tools([{**tool, "function": {"name": "f", "parameters": nested(20)}}])


def test_a_text_that_cannot_fit_is_never_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script("qwen3", [])

    async def agent(ask: Ask) -> None:
        for messages in ([user("x" * 31_000_000)], [user("x" * 300_000)] * 4):
            with pytest.raises(TooLongError, match="characters, but only 4000 tokens fit with an answer"):
                await ask(messages)

    monkeypatch.setattr(script.template, "encode", lambda *_, **__: pytest.fail("it was rendered"))
    run_case(script, agent)


def test_messages_are_rendered_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    script, threads = Script("qwen3", [said("Yes.")]), []
    encode = script.template.encode

    def noted(*given: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return encode(*given, **options)

    async def agent(ask: Ask) -> None:
        await ask([user("Ask.")])

    monkeypatch.setattr(script.template, "encode", noted)
    run_case(script, agent)
    assert threads
    assert threading.main_thread() not in threads


def test_characters_are_counted_at_any_depth() -> None:
    assert _num_characters([{"a": "xyz", "b": ["x", 5, None]}]) == 6


def test_a_message_is_read_once_it_is_whole() -> None:
    ours, theirs = multiprocessing.Pipe()
    reader = FrameReader(ours)
    theirs.send("first")
    assert reader.take() == ["first"]
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"half")
    assert reader.take() == []
    theirs.close()
    with pytest.raises(EOFError):
        reader.take()
    ours, theirs = multiprocessing.Pipe()
    os.write(theirs.fileno(), struct.pack("!i", MAX_BYTES + 1))
    with pytest.raises(OSError, match="more than"):
        FrameReader(ours).take()


def test_half_a_message_of_an_agent_stops_no_other(tmp_path: Path) -> None:
    agents = ForkedAgents("tests.odd_agents:half_a_message", tmp_path / "log")
    returned: list[tuple[AgentResult, str]] = []

    async def run() -> float:
        address = AgentEndpoint("http://127.0.0.1:1/v1", "key", "http://127.0.0.1:1/v1")
        flag = tmp_path / "flag"
        end = await agents.begin(address, {"flag": str(flag)}, lambda *given: returned.append(given))
        while not flag.exists():
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await asyncio.sleep(0.2)
        taken = time.monotonic() - began
        end()
        return taken

    try:
        assert asyncio.run(run()) < 5
    finally:
        agents.close()
    assert returned == []
