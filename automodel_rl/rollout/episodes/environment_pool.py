"""The rank's end of environments: each has a process of its own, which is ended if a call takes too long."""

import contextlib
import itertools
import multiprocessing
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from automodel_rl.errors import InputError
from automodel_rl.generators.child_process import ChildEndedError, ChildProcess
from automodel_rl.rollout.episodes.environment_server import Setup
from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn

START_SECONDS = 120.0
"""Time limit for importing the modules of tools or of an environment."""

GRACE_SECONDS = 5.0
"""Seconds that a call may be late, so that a tool can end by itself, and be answered as failed."""

END_SECONDS = 10.0
"""Longest wait for the server to end all environments."""


class EnvironmentPool:
    """Opens environments. Their server is started again if it dies.

    Args:
        setup: what is served.
        ends_on_bad_call: whether a call that cannot be read ends its conversation. If not, the model is told.

    Attributes:
        schemas: JSON schemas of the tools that environments answer.
        warning: what protection the system does not allow, in one line; empty if nothing is missing.

    Raises:
        InputError: the tools or the environment cannot be imported.
    """

    def __init__(self, setup: Setup, *, ends_on_bad_call: bool):
        self.setup, self.ends_on_bad_call = setup, ends_on_bad_call
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._server, self.schemas, self.warning = self._start()

    def open(self, example: dict[str, Any], seed: int) -> "PooledEnvironment":
        """The environment of a conversation. Its process starts with its first call."""
        return PooledEnvironment(self, example, seed)

    def begin(self) -> tuple[int, Connection]:
        """Starts a process. Returns its number and the connection to it."""
        number = next(self._numbers)
        ours, theirs = multiprocessing.Pipe()
        with self._lock, theirs:
            try:
                self._send(number, theirs)
            except (ChildEndedError, OSError):
                self._server.close()
                self._server, _, _ = self._start()
                self._send(number, theirs)
        return number, ours

    def end(self, number: int, *, at_once: bool) -> None:
        """Ends a process, with all that it has started: at once, or when it has closed its environment."""
        with self._lock, contextlib.suppress(ChildEndedError):
            self._server.send(("end" if at_once else "leave", number))

    def close(self) -> None:
        self._server.close(END_SECONDS)

    def _start(self) -> tuple[ChildProcess, list[dict[str, Any]], str]:
        server = ChildProcess([sys.executable, "-m", "automodel_rl.rollout.episodes.environment_server"])
        try:
            server.send(self.setup)
            schemas, warning, error = server.receive(START_SECONDS)
        except (ChildEndedError, TimeoutError):
            what = f"environment={self.setup.environment}" if self.setup.environment else f"tools={self.setup.tools}"
            schemas, warning, error = [], "", f"rollout.{what}: its process does not start: import it to see why"
        if error:
            server.close()
            raise InputError(error)
        return server, schemas, warning

    def _send(self, number: int, connection: Connection) -> None:
        self._server.send(("begin", number))
        send_handle(self._server.connection, connection.fileno(), self._server.process.pid)


class PooledEnvironment:
    """An `Environment` in a process of its own.

    Args:
        pool: the pool.
        example: the record of the prompt.
        seed: the seed of the prompt.
    """

    def __init__(self, pool: EnvironmentPool, example: dict[str, Any], seed: int):
        self.pool, self.example, self.seed = pool, example, seed
        self._number: int | None = None
        self._connection: Connection | None = None

    def reset(self) -> Sequence[Message]:
        if self.pool.setup.environment is None:  # tools begin nothing
            return ()
        return self._call("reset", None, self.pool.setup.tool_seconds)

    def step(self, turn: Turn) -> Outcome:
        if turn.problem:
            messages = [{"role": "user", "content": turn.problem}]
            return Outcome(messages, done=self.pool.ends_on_bad_call)
        seconds = self.pool.setup.tool_seconds
        if self.pool.setup.environment is None:
            if not turn.calls:
                return Outcome(done=True)
            seconds = seconds * len(turn.calls) + GRACE_SECONDS
        return self._call("step", turn, seconds)

    def close(self) -> None:
        if self._connection is None:
            return
        with contextlib.suppress(OSError):
            self._connection.send(("close", None))
        self._end(at_once=False)

    def _call(self, name: str, turn: Turn | None, seconds: float) -> Any:
        """The result of a call in the environment's process.

        Raises:
            RuntimeError: it failed, took too long, or its process is gone.
        """
        try:
            if self._connection is None:
                self._number, self._connection = self.pool.begin()
                self._connection.send((self.example, self.seed))
            self._connection.send((name, turn))
            if not self._connection.poll(seconds):
                raise RuntimeError(f"{name} took longer than rollout.tool_seconds={self.pool.setup.tool_seconds:g}")
            value, error = self._connection.recv()
        except (OSError, EOFError):
            error = f"its process ended in {name}"
        except RuntimeError as problem:
            error = str(problem)
        if error:
            self._end(at_once=True)
            raise RuntimeError(error)
        return value

    def _end(self, *, at_once: bool) -> None:
        if self._connection is not None and self._number is not None:
            self._connection.close()
            self.pool.end(self._number, at_once=at_once)
        self._connection = self._number = None
