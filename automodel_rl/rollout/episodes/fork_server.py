"""Server that imports the user's code once, and forks a process for every episode.

It receives orders: ("begin", number), followed by the descriptor of an episode's own connection; ("end", number),
which kills its process; or ("leave", number), which kills it if it does not end by itself soon.

A process announces itself with None on its connection. All that it starts ends with it: it adopts orphans among its
descendants, and the server ends what it leaves behind.
"""

import contextlib
import ctypes
import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from automodel_rl.launch.forks import renew_thread_pool

PR_SET_CHILD_SUBREAPER = 36

LOOK_SECONDS = 0.1
"""Polling interval for processes that have ended."""

LEAVE_SECONDS = 2.0
"""Time for an episode's process to end by itself."""

MAX_LOG_BYTES = 2**22
"""Largest log of the processes' output. A larger one is truncated to start anew."""


class ForkServer:
    """Forks processes that call `serve` with the connection of their episode, and ends them."""

    def __init__(self, connection: Connection, serve: Callable[[Connection], None], log: str):
        self.connection, self.serve = connection, serve
        self._log_path = Path(log)
        self.processes: dict[int, int] = {}
        self.deadlines: dict[int, float] = {}

    @functools.cached_property
    def log(self) -> int:
        """Descriptor of the log, created with the first episode."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def run(self, greeting: Any) -> None:
        """Sends the greeting, and serves until the rank is gone."""
        _adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.own = set(_children(os.getpid()))  # started by the import of the user's module
        gc.freeze()  # garbage collection in forked processes would copy these pages
        self.connection.send(greeting)
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
        for number in self.processes:  # those that are leaving keep their time
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
            _serve_episode(Connection(handle), self.serve, log)
        os.close(handle)
        self.processes[number] = pid

    def _look(self) -> None:
        """Reaps processes that have ended, ends what they left behind, and keeps the log small."""
        self._end_late()
        ended = [number for number, pid in self.processes.items() if os.waitpid(pid, os.WNOHANG)[0]]
        for number in ended:
            _kill_group(self.processes.pop(number))
            self.deadlines.pop(number, None)
        known = self.own | set(self.processes.values())
        _end_children(lambda pid: pid not in known)
        if self._log_path.exists() and os.fstat(self.log).st_size > MAX_LOG_BYTES:
            os.ftruncate(self.log, 0)
            os.write(self.log, f"(earlier output, more than {MAX_LOG_BYTES} bytes, was dropped)\n".encode())

    def _end_late(self) -> None:
        now = time.monotonic()
        for number, deadline in self.deadlines.items():
            if now >= deadline and number in self.processes:
                _kill_group(self.processes[number])


def _serve_episode(connection: Connection, serve: Callable[[Connection], None], log: int) -> None:
    renew_thread_pool()
    os.setsid()
    _adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        connection.send(None)
        serve(connection)
    except (EOFError, OSError):
        pass
    finally:
        _end_children(lambda pid: True)
        os._exit(0)


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _end_children(is_ended: Callable[[int], bool]) -> None:
    """Kills children of this process, and their children, which it then adopts."""
    for _ in range(100):
        pids = [pid for pid in _children(os.getpid()) if is_ended(pid)]
        if not pids:
            return
        for pid in pids:
            _kill_group(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children(parent: int) -> list[int]:
    """Returns a process's children, including zombies."""
    lists = [*Path(f"/proc/{parent}/task").glob("*/children")]
    if not lists:  # a kernel without these lists
        return _children_of_all(parent)
    found: list[int] = []
    for file in lists:
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, file.read_text().split())
    return found


def _children_of_all(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, its_parent, *_ = status.read_text().rpartition(")")[2].split()
            if int(its_parent) == parent:
                found.append(int(status.parent.name))
    return found
