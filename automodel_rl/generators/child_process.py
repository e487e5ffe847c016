"""Child process that exchanges pickled messages.

The child gets the file descriptor of its end of the pipe as its last argument, and opens it with
`multiprocessing.connection.Connection(int(sys.argv[-1]))`.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.5
"""Interval of checks that a child is alive. Its end may not close the pipe, which its own children may hold open."""


MAX_SECONDS_TO_DIE = 30.0
"""Timeout for killed processes to end, which a GPU driver may delay."""


class ChildEndedError(RuntimeError):
    """The child process is gone."""


class ChildProcess:
    """Starts a command as a child process. Raises OSError if that fails."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self.connection, theirs = multiprocessing.Pipe()
        self._send_lock, self._is_closed = threading.Lock(), False
        try:
            # A session of its own, so that Ctrl-C reaches only the rank, which finishes its step first.
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # to stderr: output of libraries must not mix with this process's
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()

    def send(self, message: Any) -> None:
        """Sends a message, from any thread. Raises ChildEndedError if the child is gone."""
        try:
            with self._send_lock:
                self.connection.send(message)
        except OSError:
            raise self._ended() from None

    def has_message(self, seconds: float = 0.0) -> bool:
        """Returns whether a message arrives within `seconds`. Raises ChildEndedError if none will."""
        try:
            if self.connection.poll(seconds):
                return True
        except OSError:
            raise self._ended() from None
        if self.process.poll() is not None and not self.connection.poll():
            raise self._ended()
        return False

    def receive(self, seconds: float | None = None) -> Any:
        """Returns the next message.

        Raises:
            TimeoutError: it did not arrive in `seconds`.
            ChildEndedError: the child is gone.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self.has_message(POLL_SECONDS if deadline is None else min(POLL_SECONDS, _left(deadline))):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
        try:
            return self.connection.recv()
        except (OSError, EOFError):
            raise self._ended() from None

    def close(self, seconds: float = 0.0) -> None:
        """Closes the pipe, waits at most `seconds` for the child to end by itself, then kills it and all processes of
        its session."""
        self.connection.close()
        if self._is_closed:  # its pid may have been reused
            return
        self._is_closed = True
        _wait_while(lambda: self.process.poll() is None, seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _wait_while(lambda: _is_alive(self.process.pid), MAX_SECONDS_TO_DIE)  # they would still hold memory

    def _ended(self) -> ChildEndedError:
        return ChildEndedError(f"its process exited with code {self.process.wait()}")


def _wait_while(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and condition():
        time.sleep(0.01)


def _is_alive(group: int) -> bool:
    """Returns whether a process of a group is alive, not counting zombies."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = status.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
