"""Processes that tests start: waited for while they get on, and ended with all below them, however a test ends."""

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.warm import HELPER, popen

QUIET_SECONDS = 300.0
"""Processes that do not use a second of processor time within so long have come to a halt, on a loaded machine, too."""

TICKS = os.sysconf("SC_CLK_TCK")


class Patience:
    """Waits for processes as long as they get on, however slowly.

    Args:
        find: returns the processes' ids, which may change.
        most_seconds: most seconds of processor time that they may use.
    """

    def __init__(self, find: Callable[[], Iterable[int]], most_seconds: float = math.inf):
        self._find = find
        self._start = self._last = self._used()
        self._most, self._since = most_seconds, time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the processes have come to a halt, or used too much processor time."""
        used, now = self._used(), time.monotonic()
        if abs(used - self._last) >= 1.0:  # less, where one has ended
            self._last, self._since = used, now
        return now - self._since > QUIET_SECONDS or used - self._start > self._most

    def _used(self) -> float:
        return sum(map(processor_seconds, self._find()))


class Job:
    """A command, and what it starts. A context manager, which leaves nothing behind.

    Args:
        command: program and arguments. `python -m MODULE` is a fork of a process that has imported its libraries.
        options: of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], **options: Any):
        self._folder = tempfile.TemporaryDirectory(prefix="job_")
        self._files = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            streams = {"stdout": out, "stderr": err, **options}
            self.process = popen(command, start_new_session=True, **streams)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._folder.cleanup()

    @property
    def stdout(self) -> str:
        return self._files[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._files[1].read_text(errors="replace")

    def processes(self) -> list[int]:
        """Ids of the command and all processes below it."""
        return [self.process.pid, *descendants_of(self.process.pid)]

    def wait_until(self, happens: Callable[[], bool], poll_seconds: float = 0.02) -> bool:
        """Whether something happened before the command's end. Raises AssertionError if the job comes to a halt."""
        patience = Patience(self.processes)
        while not happens():
            if self.process.poll() is not None:
                return happens()
            assert not patience.is_over, f"the job has come to a halt:\n{self.stdout}{self.stderr}"
            time.sleep(poll_seconds)
        return True

    def finish(self) -> int:
        """Waits for the command's end, and returns its exit code."""
        self.wait_until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def _kill(self) -> None:
        left = self.processes() if self.process.poll() is None else []
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_for_end(left)


def run_command(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with options of `subprocess.Popen`."""
    with Job(command, **options) as job:
        return subprocess.CompletedProcess(command, job.finish(), job.stdout, job.stderr)


def wait_for_end(pids: Iterable[int]) -> None:
    """Raises AssertionError if processes that should end come to a halt instead."""
    pids = [*pids]
    patience = Patience(lambda: pids)
    while any(map(is_alive, pids)):
        assert not patience.is_over, f"of the processes {pids} some live on"
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Processes that a process has started: forks of its own helpers, and ordinary ones."""
    try:
        children = [int(child) for task in os.listdir(f"/proc/{pid}/task") for child in _children_of_task(pid, task)]
    except OSError:
        return []
    return [each for child in children for each in (children_of(child) if _is_helper(child) else [child])]


def descendants_of(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have started."""
    children = children_of(pid)
    return children + [each for child in children for each in descendants_of(child)]


def _children_of_task(pid: int, task: str) -> list[str]:
    return Path(f"/proc/{pid}/task/{task}/children").read_text().split()


def _is_helper(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip() == HELPER
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended. Its threads end one after the other, the first one not always
    last."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    states = (_status_of(f"{pid}/task/{thread}")[:1] for thread in threads)
    return any(state[0] not in "ZX" for state in states if state)


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used, with that of children it has waited for."""
    return sum(map(int, _status_of(pid)[11:15])) / TICKS


def _status_of(pid: int | str) -> list[str]:
    """Fields of the status of a process, or of a thread (`PID/task/THREAD`), from its state on; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
