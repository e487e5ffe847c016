"""Tools: what calls are answered."""

import time
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.errors import InputError
from automodel_rl.quickstart.calculator import calculator
from automodel_rl.rollout.episodes.environment_pool import EnvironmentPool
from automodel_rl.rollout.episodes.environment_server import Setup
from automodel_rl.rollout.episodes.protocol import Turn
from automodel_rl.rollout.episodes.tools import ToolEnvironment, load_tools


async def wait_a_moment(word: str) -> dict[str, str]:
    """Waits.

    Args:
        word: What to return.
    """
    return {"word": word}


def sleep(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def test_every_call_is_answered_in_order() -> None:
    tools = {"calculator": calculator, "wait_a_moment": wait_a_moment, "sleep": sleep}
    calls = [
        call("calculator", expression="47 * 86"),
        call("wait_a_moment", word="now"),
        call("calculator", expression="__import__('os')"),
        call("calculator", formula="1"),
        call("calculate", expression="1"),
        {"name": "calculator", "arguments": "47 * 86"},
        call("sleep", seconds=30),
    ]
    outcome = ToolEnvironment(tools, 2.0).step(Turn("", calls=calls))
    assert [message["content"].split(":")[0] for message in outcome.messages] == [
        "4042",
        '{"word"',
        *["error"] * 5,
    ]
    assert all(message["role"] == "tool" for message in outcome.messages)
    assert "no tool is called calculate: use calculator or" in outcome.messages[4]["content"]
    assert "took longer than 2 s" in outcome.messages[6]["content"]
    assert outcome.metrics == {"failed_calls": 4.0, "timed_out_calls": 1.0}
    assert ToolEnvironment(tools, 2.0).step(Turn("Done.")).done


def test_bad_calls_are_answered_or_end_the_conversation(tmp_path: Path) -> None:
    setup = Setup(None, ("automodel_rl.quickstart.calculator:calculator",), 5.0, "auto", str(tmp_path / "log"))
    for ends in (True, False):
        pool = EnvironmentPool(setup, ends_on_bad_call=ends)
        try:
            environment = pool.open({}, 0)
            outcome = environment.step(Turn("<tool_call>", problem="it has no end"))
            assert (outcome.done, [message["content"] for message in outcome.messages]) == (ends, ["it has no end"])
            (answer,) = environment.step(Turn("", calls=[call("calculator", expression="2 + 3")])).messages
            assert answer["content"] == "5"
            environment.close()
        finally:
            pool.close()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("os.path:join",), "its schema requires type hints"),
        (("automodel_rl.quickstart.calculator:calculator",) * 2, "two tools are named calculator"),
        (("automodel_rl.quickstart.calculator:QUESTIONS",), "is not a function but"),
    ],
)
def test_what_is_no_tool_is_refused(paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_tools(paths, True, 1.0)
