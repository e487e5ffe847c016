"""A process of one's own that answers pickled messages over its stdin and stdout."""

import contextlib
import os
import pickle
import signal
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import IO, Any


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
        # A session of its own: Ctrl-C is for the rank, which finishes its step first.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )

    def send(self, message: Any) -> None:
        """Raises ChildEndedError."""
        try:
            pickle.dump(message, _given(self.process.stdin))
            _given(self.process.stdin).flush()
        except OSError:
            raise self._ended() from None

    def receive(self, seconds: float | None = None) -> Any:
        """The next message; waits for ever without `seconds`.

        Raises:
            TimeoutError: none came.
            ChildEndedError: none will.
        """
        pipe = _given(self.process.stdout)
        if not wait([pipe.fileno()], seconds):
            raise TimeoutError
        try:
            return pickle.load(pipe)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise self._ended() from None

    def close(self) -> None:
        """Ends it at once, with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                _given(pipe).close()
        self.process.wait()

    def _ended(self) -> ChildEndedError:
        return ChildEndedError(f"its process ended with code {self.process.wait()}")


def _given(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
