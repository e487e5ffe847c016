"""The rank's end of a server that forks a process for every episode."""

import contextlib
import itertools
import multiprocessing
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from automodel_rl.errors import InputError
from automodel_rl.generators.child_process import ChildEndedError, ChildProcess

START_SECONDS = 120.0
"""Timeout for importing the user's modules."""

FORK_SECONDS = 60.0
"""Timeout for the first message of a forked process."""

END_SECONDS = 10.0
"""Timeout for the server to end all processes."""


class ForkPool:
    """Starts and ends processes of episodes. Restarts their server if it dies.

    Args:
        module: the server's module, which receives the setup and answers (greeting, error).
        what: the setting that names the user's code, for errors.

    Raises:
        InputError: the server does not start.
    """

    def __init__(self, module: str, setup: Any, what: str):
        self.module, self.setup, self.what = module, setup, what
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._is_closed = False
        self._server, self.greeting = self._start()

    def begin(self) -> tuple[int, Connection]:
        """Starts a process and waits for it. Returns its number and the connection to it. Concurrent calls take turns.

        Raises:
            TimeoutError: it did not start in time, and was ended.
        """
        number = next(self._numbers)
        ours, theirs = multiprocessing.Pipe()
        with self._lock, theirs:
            try:
                self._send(number, theirs)
            except (ChildEndedError, OSError):
                if self._is_closed:
                    raise
                self._server.close()
                self._server, _ = self._start()
                self._send(number, theirs)
        if not ours.poll(FORK_SECONDS):
            ours.close()
            self.end(number, immediately=True)
            raise TimeoutError(
                f"a process for rollout.{self.what} did not start within {FORK_SECONDS:g} s: see its log"
            )
        with contextlib.suppress(EOFError, OSError):  # it has ended: the user of the connection will notice
            ours.recv()
        return number, ours

    def end(self, number: int, *, immediately: bool) -> None:
        """Ends a process and all that it has started: `immediately`, or after some time to end by itself."""
        with self._lock, contextlib.suppress(ChildEndedError):
            self._server.send(("end" if immediately else "leave", number))

    def close(self) -> None:
        self._is_closed = True
        self._server.close(END_SECONDS)

    def _start(self) -> tuple[ChildProcess, Any]:
        server = ChildProcess([sys.executable, "-m", self.module])
        try:
            server.send(self.setup)
            greeting, error = server.receive(START_SECONDS)
        except (ChildEndedError, TimeoutError):
            greeting, error = None, f"rollout.{self.what}: its process failed to start: import it to see why"
        if error:
            server.close()
            raise InputError(error)
        return server, greeting

    def _send(self, number: int, connection: Connection) -> None:
        self._server.send(("begin", number))
        send_handle(self._server.connection, connection.fileno(), self._server.process.pid)
