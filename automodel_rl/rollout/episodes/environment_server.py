"""A process that imports an environment or tools once, and forks a process of its own for every conversation.

    python -m automodel_rl.rollout.episodes.environment_server DESCRIPTOR

Over the connection with that file descriptor come a `Setup`, which is answered by (schemas of tools, warning, error),
and then orders: ("begin", number) and the descriptor of a conversation's own connection; ("end", number), which ends
its process at once; or ("leave", number), which ends it if it does not end by itself soon.

A conversation's process serves ("reset", None), ("step", Turn) and ("close", None) with (value, error). Whatever it
starts ends with it: it adopts orphans among its descendants, and the server ends what it leaves behind.
"""

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from automodel_rl.errors import InputError
from automodel_rl.import_path import import_function
from automodel_rl.rollout.episodes.outcomes import checked_messages, checked_outcome, explain
from automodel_rl.rollout.episodes.protocol import Environment, EnvironmentFactory
from automodel_rl.rollout.episodes.python_tool import check_sandbox
from automodel_rl.rollout.episodes.tools import PYTHON, ToolEnvironment, load_tools, schemas_of

PR_SET_CHILD_SUBREAPER = 36

LOOK_SECONDS = 0.1
"""Seconds between two looks for processes that have ended."""

LEAVE_SECONDS = 2.0
"""Longest time in which an environment closes."""

MOST_LOG_BYTES = 2**22
"""Largest log of what environments print. A larger one begins anew."""


@dataclass(frozen=True)
class Setup:
    """What the server serves.

    Attributes:
        environment: import path of an environment's factory; None for tools.
        tools: import paths of tools.
        tool_seconds: time limit of a tool's call.
        sandbox: rollout.sandbox, the protection of the tool `python`.
        log: file for what environments print.
    """

    environment: str | None
    tools: tuple[str, ...]
    tool_seconds: float
    sandbox: str
    log: str


def main() -> None:
    connection = Connection(int(sys.argv[-1]))
    setup: Setup = connection.recv()
    try:
        make, schemas, warning = _load(setup)
    except InputError as error:
        connection.send(([], "", str(error)))
        return
    _adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Server(connection, make, setup.log).serve(schemas, warning)


def _load(setup: Setup) -> tuple[EnvironmentFactory, list[dict[str, Any]], str]:
    """What makes environments, the JSON schemas of their tools, and a warning if there is one."""
    if setup.environment is None:
        tools = load_tools(setup.tools, setup.sandbox != "none", setup.tool_seconds)
        warning = check_sandbox(setup.sandbox) if PYTHON in setup.tools else ""
        return (lambda example, seed: ToolEnvironment(tools, setup.tool_seconds)), schemas_of(tools), warning
    factory = import_function("rollout.environment", setup.environment)
    if not callable(factory):
        raise InputError(f"rollout.environment={setup.environment}: is no function but {factory!r:.60}: name a factory")
    schemas = [dict(schema) for schema in vars(factory).get("tools", ())]
    if not all(isinstance(schema.get("function"), dict) and "name" in schema["function"] for schema in schemas):
        raise InputError(
            f"rollout.environment={setup.environment}: its tools must be JSON schemas with a function and its name: "
            "make them with transformers.utils.get_json_schema"
        )
    return factory, schemas, ""


class _Server:
    """Forks processes and ends them."""

    def __init__(self, connection: Connection, make: EnvironmentFactory, log: str):
        self.connection, self.make = connection, make
        self._log_path = Path(log)
        self.processes: dict[int, int] = {}
        self.deadlines: dict[int, float] = {}

    @functools.cached_property
    def log(self) -> int:
        """Descriptor of the log, which is there from the first conversation on."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def serve(self, schemas: list[dict[str, Any]], warning: str) -> None:
        self.own = set(_children(os.getpid()))  # what the user's module started when it was imported
        self.connection.send((schemas, warning, ""))
        with contextlib.suppress(EOFError, OSError):  # the rank is gone
            while True:
                if not self.connection.poll(LOOK_SECONDS):
                    self._look()
                    continue
                order, number = self.connection.recv()
                if order == "begin":
                    self._begin(number)
                else:
                    self.deadlines[number] = time.monotonic() + (LEAVE_SECONDS if order == "leave" else 0.0)
                self._end_late()
        for number in self.processes:  # those that leave may still do so
            self.deadlines.setdefault(number, 0.0)
        deadline = time.monotonic() + 2 * LEAVE_SECONDS
        while self.processes and time.monotonic() < deadline:
            self._look()
            time.sleep(0.01)

    def _begin(self, number: int) -> None:
        handle, log = recv_handle(self.connection), self.log
        pid = os.fork()
        if pid == 0:
            self.connection.close()
            _serve_conversation(Connection(handle), self.make, log)
        os.close(handle)
        self.processes[number] = pid

    def _look(self) -> None:
        """Forgets processes that have ended, ends what they left behind, and keeps the log small."""
        self._end_late()
        ended = [number for number, pid in self.processes.items() if os.waitpid(pid, os.WNOHANG)[0]]
        for number in ended:
            _kill_group(self.processes.pop(number))
            self.deadlines.pop(number, None)
        known = self.own | set(self.processes.values())
        _end_children(lambda pid: pid not in known)
        if self._log_path.exists() and os.fstat(self.log).st_size > MOST_LOG_BYTES:
            os.ftruncate(self.log, 0)
            os.write(self.log, f"(what came before, more than {MOST_LOG_BYTES} bytes, is left out)\n".encode())

    def _end_late(self) -> None:
        """Ends processes whose time is over."""
        now = time.monotonic()
        for number, deadline in self.deadlines.items():
            if now >= deadline and number in self.processes:
                _kill_group(self.processes[number])


def _serve_conversation(connection: Connection, make: EnvironmentFactory, log: int) -> None:
    """Serves one environment in a process of its own, and ends it."""
    os.setsid()
    _adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        example, seed = connection.recv()
        _serve_environment(connection, make, example, seed)
    except (EOFError, OSError):
        pass
    finally:
        _end_children(lambda pid: True)
        os._exit(0)


def _serve_environment(connection: Connection, make: EnvironmentFactory, example: dict[str, Any], seed: int) -> None:
    environment: Environment | None = None
    error = ""
    try:
        environment = make(example, seed)
    except Exception as problem:
        error = explain(problem)
    while True:
        name, turn = connection.recv()
        if environment is None:
            connection.send((None, error))
            continue
        try:
            match name:
                case "reset":
                    answer: Any = checked_messages(environment.reset(), "reset")
                case "step":
                    answer = checked_outcome(environment.step(turn))
                case _:
                    environment.close()
                    return
        except Exception as problem:
            connection.send((None, explain(problem)))
        else:
            connection.send((answer, ""))


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _end_children(is_ended: Callable[[int], bool]) -> None:
    """Ends children of this process, and their children, which become its own."""
    for _ in range(100):
        pids = [pid for pid in _children(os.getpid()) if is_ended(pid)]
        if not pids:
            return
        for pid in pids:
            _kill_group(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, its_parent, *_ = status.read_text().rpartition(")")[2].split()
            if int(its_parent) == parent:
                found.append(int(status.parent.name))
    return found


if __name__ == "__main__":
    main()
