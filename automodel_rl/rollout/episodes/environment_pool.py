"""The rank's end of environments. Each has its own process, which is ended if a call takes too long."""

import contextlib
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from automodel_rl.rollout.episodes.environment_server import Setup
from automodel_rl.rollout.episodes.fork_pool import ForkPool
from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn

GRACE_SECONDS = 5.0
"""Extra time of a call, in which a tool times out by itself and is answered as failed."""


class EnvironmentPool:
    """Opens environments.

    Args:
        ends_on_bad_call: a malformed call ends its conversation. Otherwise the model is sent the error.

    Attributes:
        schemas: JSON schemas of the tools.
        warning: one line on missing protection; empty if none is missing.

    Raises:
        InputError: the tools or the environment cannot be imported.
    """

    def __init__(self, setup: Setup, *, ends_on_bad_call: bool):
        self.setup, self.ends_on_bad_call = setup, ends_on_bad_call
        what = f"environment={setup.environment}" if setup.environment else f"tools={setup.tools}"
        self._processes = ForkPool("automodel_rl.rollout.episodes.environment_server", setup, what)
        self.schemas: list[dict[str, Any]]
        self.schemas, self.warning = self._processes.greeting
        self.begin, self.end, self.close = self._processes.begin, self._processes.end, self._processes.close

    def open(self, example: dict[str, Any], seed: int) -> "PooledEnvironment":
        """Returns the environment of a conversation. Its process starts with the first call."""
        return PooledEnvironment(self, example, seed)


class PooledEnvironment:
    """An `Environment` in its own process."""

    def __init__(self, pool: EnvironmentPool, example: dict[str, Any], seed: int):
        self.pool, self.example, self.seed = pool, example, seed
        self._number: int | None = None
        self._connection: Connection | None = None

    def reset(self) -> Sequence[Message]:
        if self.pool.setup.environment is None:  # tools have no first messages
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
        self._end(immediately=False)

    def _call(self, name: str, turn: Turn | None, seconds: float) -> Any:
        """Calls a method in the environment's process. Raises RuntimeError if it fails or takes too long."""
        try:
            if self._connection is None:
                self._number, self._connection = self.pool.begin()
                self._connection.send((self.example, self.seed))
            self._connection.send((name, turn))
            if not self._connection.poll(seconds):
                raise RuntimeError(f"{name} took longer than rollout.tool_seconds={self.pool.setup.tool_seconds:g}")
            value, error = self._connection.recv()
        except (OSError, EOFError):
            error = f"its process exited in {name}"
        except RuntimeError as problem:
            error = str(problem)
        if error:
            self._end(immediately=True)
            raise RuntimeError(error)
        return value

    def _end(self, *, immediately: bool) -> None:
        if self._connection is not None and self._number is not None:
            self._connection.close()
            self.pool.end(self._number, immediately=immediately)
        self._connection = self._number = None
