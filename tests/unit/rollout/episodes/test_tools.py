"""Tools: what calls are answered, and what the sandbox of the tool `python` keeps code from."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.errors import InputError
from automodel_rl.quickstart.calculator import calculator
from automodel_rl.rollout.episodes import python_tool
from automodel_rl.rollout.episodes.environment_pool import EnvironmentPool
from automodel_rl.rollout.episodes.environment_server import Setup
from automodel_rl.rollout.episodes.protocol import Turn
from automodel_rl.rollout.episodes.python_tool import run_python
from automodel_rl.rollout.episodes.tools import ToolEnvironment, load_tools, schemas_of


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
    setup = Setup(None, ("automodel_rl.quickstart.calculator:calculator",), 5.0, True, str(tmp_path / "log"))
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
        (("os.path:join",), "its schema comes from type hints"),
        (("automodel_rl.quickstart.calculator:calculator",) * 2, "two tools are called calculator"),
        (("automodel_rl.quickstart.calculator:QUESTIONS",), "is no function but"),
    ],
)
def test_what_is_no_tool_is_refused(paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_tools(paths, True, 1.0)


def has_namespaces() -> bool:
    try:
        python_tool.check_sandbox()
    except InputError:
        return False
    return True


protected = pytest.mark.skipif(not has_namespaces(), reason="the system gives no namespaces")

CONNECT = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else PORT), 2)
    print("connected")
except OSError as error:
    print("refused", error.errno)
"""


def test_python_prints_its_result() -> None:
    (schema,) = schemas_of(load_tools(["python"], False, 5.0))
    assert schema["function"]["name"] == "python"
    assert run_python("print(6 * 7)", 600.0, is_sandboxed=False) == "42"
    assert run_python("x = 1", 600.0, is_sandboxed=False) == "(it printed nothing)"
    failed = run_python("print('before')\n1 / 0", 600.0, is_sandboxed=False)
    assert failed.startswith("before")
    assert failed.endswith("ZeroDivisionError: division by zero\n\n(it ended with code 1)")
    assert "HOME" not in run_python("import os; print(*os.environ)", 600.0, is_sandboxed=False)


@pytest.mark.parametrize("is_sandboxed", [False, pytest.param(True, marks=protected)])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("bytearray(3 * 2**30)", "MemoryError"),
        ("while True: print('x' * 10000)", "it ended with code"),
        ("open('big', 'wb').write(bytes(5 * 2**20))", "it ended with code"),
        ("import socket\nsockets = [socket.socket() for _ in range(100)]", "Too many open files"),
    ],
)
def test_code_has_limits(code: str, expected: str, is_sandboxed: bool) -> None:
    found = run_python(code, 600.0, is_sandboxed)
    assert expected in found
    assert len(found) <= python_tool.OUTPUT_BYTES + 100


@protected
@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(600)"])
def test_code_that_does_not_end_is_ended_with_all_that_it_started(code: str) -> None:
    spawn = "import os, time\nfor _ in range(3):\n    if not os.fork():\n        os.setsid()\n        time.sleep(600)\n"
    before = sleepers()
    with pytest.raises(TimeoutError):
        run_python(spawn + code, 1.0, is_sandboxed=True)
    while sleepers() - before:
        time.sleep(0.01)


def sleepers() -> set[str]:
    """Processes that run code by `python -I -u -c`."""
    found = set()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"-I\0-u\0-c\0import os, time\nfor" in command.read_bytes():
                found.add(command.parent.name)
        except OSError:
            continue
    return found


@protected
def test_code_sees_no_network_and_no_other_process() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = CONNECT.replace("PORT", str(server.getsockname()[1]))
        assert run_python(code, 600.0, is_sandboxed=False) == "connected"
        assert run_python(code, 600.0, is_sandboxed=True).startswith("refused")
    assert run_python("import os; print(os.getpid())", 600.0, is_sandboxed=True) == "1"
    own = f"import os\ntry:\n    os.kill({os.getpid()}, 0); print('seen')\nexcept OSError: print('not there')"
    assert run_python(own, 600.0, is_sandboxed=True) == "not there"


def test_a_run_without_protection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> str:
        return "unshare: Operation not permitted"

    monkeypatch.setattr(python_tool, "run_python", refused)
    with pytest.raises(InputError, match="allow unprivileged user namespaces, or set rollout.sandbox to none"):
        python_tool.check_sandbox()
