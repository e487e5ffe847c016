"""A process of one's own that answers pickled messages.

The child gets the file descriptor of its end as its last argument: `Connection(int(sys.argv[-1]))` of
multiprocessing.connection.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

LOOK_SECONDS = 0.5
"""How often a process that is waited for is looked at: one of its own children may hold its end open."""


class ChildEndedError(RuntimeError):
    """The process is gone."""


class ChildProcess:
    """Starts a command.

    Args:
        command: program and arguments.
        environment: its variables; None for this process's.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self.connection, theirs = multiprocessing.Pipe()
        try:
            # A session of its own: Ctrl-C is for the rank, which finishes its step first.
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints there is not for whoever reads this process's output
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
        """Raises ChildEndedError."""
        try:
            self.connection.send(message)
        except OSError:
            raise self._ended() from None

    def has_message(self, seconds: float = 0.0) -> bool:
        """Whether a message has come, within so many seconds. Raises ChildEndedError if none will."""
        try:
            if self.connection.poll(seconds):
                return True
        except OSError:
            raise self._ended() from None
        if self.process.poll() is not None and not self.connection.poll():
            raise self._ended()
        return False

    def receive(self, seconds: float | None = None) -> Any:
        """The next message; waits for ever without `seconds`.

        Raises:
            TimeoutError: none came.
            ChildEndedError: none will.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self.has_message(LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, _left(deadline))):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
        try:
            return self.connection.recv()
        except (OSError, EOFError):
            raise self._ended() from None

    def close(self) -> None:
        """Ends it at once, with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        self.process.wait()

    def _ended(self) -> ChildEndedError:
        return ChildEndedError(f"its process ended with code {self.process.wait()}")


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
