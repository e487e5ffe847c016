"""A child process that receives and answers pickled messages.

The child gets the file descriptor of its end of the pipe as its last argument, and opens it by
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

LOOK_SECONDS = 0.5
"""Seconds between two checks that a child is alive. The pipe alone does not show its end: the child's own children may
hold it open."""


MOST_SECONDS_TO_DIE = 30.0
"""Longest wait for processes that are killed, which the driver of a GPU may delay."""


class ChildEndedError(RuntimeError):
    """The child process is gone."""


class ChildProcess:
    """Starts a command as a child process.

    Args:
        command: the program and its arguments.
        environment: the child's environment variables; None for this process's.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self.connection, theirs = multiprocessing.Pipe()
        self._sending, self._is_closed = threading.Lock(), False
        try:
            # A session of its own, so that Ctrl-C reaches only the rank, which finishes its step first.
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # to stderr: what libraries print there must not mix with this process's output
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
            with self._sending:
                self.connection.send(message)
        except OSError:
            raise self._ended() from None

    def has_message(self, seconds: float = 0.0) -> bool:
        """Whether a message has come or comes within so many seconds. Raises ChildEndedError if none will come."""
        try:
            if self.connection.poll(seconds):
                return True
        except OSError:
            raise self._ended() from None
        if self.process.poll() is not None and not self.connection.poll():
            raise self._ended()
        return False

    def receive(self, seconds: float | None = None) -> Any:
        """The next message. Waits for at most `seconds`, or without limit.

        Raises:
            TimeoutError: no message came in time.
            ChildEndedError: the child is gone.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self.has_message(LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, _left(deadline))):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
        try:
            return self.connection.recv()
        except (OSError, EOFError):
            raise self._ended() from None

    def close(self, seconds: float = 0.0) -> None:
        """Ends the child and everything that it has started in its session.

        Args:
            seconds: longest wait for the child to end by itself, as it does where its pipe has an end. Then it and its
                own children are killed.
        """
        self.connection.close()
        if self._is_closed:  # another process may have its number by now
            return
        self._is_closed = True
        _wait_while(lambda: self.process.poll() is None, seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _wait_while(lambda: _is_alive(self.process.pid), MOST_SECONDS_TO_DIE)  # else they would still hold memory

    def _ended(self) -> ChildEndedError:
        return ChildEndedError(f"its process ended with code {self.process.wait()}")


def _wait_while(condition: Callable[[], bool], seconds: float) -> None:
    """Waits while a condition holds, at most so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and condition():
        time.sleep(0.01)


def _is_alive(group: int) -> bool:
    """Whether a process of a group is alive. Those that are dead but not yet waited for are not."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = status.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
