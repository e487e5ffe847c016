"""Lock of a run directory: at most one run uses it, on any machine.

The lock file names the process that holds the lock. While the run lives, the process holds an operating-system lock
on the file, released at its end, and renews the file's modification time. Either may be inconclusive: the OS lock
may be invisible to other machines or unsupported by the file system, and a process on another machine cannot be
looked up. So:

- a held OS lock means a live run, even a suspended one
- a process on this machine is looked up by pid and start time
- a killed process may hold its lock for a while: its threads end one by one, and one that writes to a busy disk ends
  last
- for a process on another machine the modification time decides, by the clock of the folder's file system
"""

import atexit
import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from automodel_rl.errors import InputError, JobEndedError

RENEWED_EVERY = 20.0
"""Seconds between renewals of the modification time."""

DEAD_AFTER = 300.0
"""Seconds without renewal after which a run on another machine counts as dead."""

PROBE_SECONDS = 2.0
"""Longest time in seconds for which another process may hold the lock only to test whether it is free."""

EXIT_WAIT_SECONDS = 60.0
"""Longest wait in seconds for a killed process to end."""

PF_EXITING = 0x4
"""Flag of an exiting thread (`include/linux/sched.h`)."""

JOB_VARIABLE = "AUTOMODEL_RL_JOB"
"""Environment variable with a job name that stays the same when the job's driver restarts it."""

_held: dict[tuple[int, int], "RunLock"] = {}
"""This process's locks by device and inode. Opening a locked file again and closing it would release the lock."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host: host name.
        machine: boot id and pid namespace; processes with the same value can be looked up.
        started: start time in clock ticks since boot; empty if unknown.
        since: time at which it took the lock, as text.
        job: the job's name; empty if it has none.
    """

    host: str
    machine: str
    pid: int
    started: str
    since: str
    job: str = ""

    @property
    def is_here(self) -> bool:
        return self.machine == _machine()

    @property
    def is_alive_here(self) -> bool:
        return self.is_here and self.started != "" and _start_of(self.pid) == self.started

    @property
    def is_ending_here(self) -> bool:
        """Whether the process can be looked up and has been killed, but still holds resources."""
        return self.is_here and _is_ending(self.pid)

    @property
    def is_this_process(self) -> bool:
        return self.is_here and self.pid == os.getpid()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@dataclass(frozen=True)
class Liveness:
    """Evidence of a live run of another process.

    Attributes:
        holder: content of the lock file; None if unreadable.
        seconds: seconds since the last renewal.
        is_certain: False if only the last renewal suggests that the run lives.
    """

    holder: Holder | None
    seconds: float
    is_certain: bool

    def __str__(self) -> str:
        return f"{self.holder or 'an unknown process'}, last alive {max(self.seconds, 0):.0f} s ago"


def find_liveness(file: Path, *, exact: bool = False) -> Liveness | None:
    """Returns evidence that another process runs in the lock file's folder; None if there is none.

    Args:
        exact: take the time from the folder's file system, by creating and removing a file there, instead of from
            this machine's clock.
    """
    try:
        found = file.stat()
    except OSError:
        return None
    if (found.st_dev, found.st_ino) in _held:
        return None
    try:
        with file.open("r+") as opened:
            holder = _read(opened.fileno())
            is_held = _is_held(opened.fileno())
    except OSError:
        return None
    if is_held or (holder is not None and holder.is_alive_here and not holder.is_this_process):
        return Liveness(holder, time.time() - found.st_mtime, is_certain=True)
    if holder is None or holder.is_here:
        return None
    seconds = (_now_of(file.parent) if exact else time.time()) - found.st_mtime
    return None if seconds > DEAD_AFTER else Liveness(holder, seconds, is_certain=False)


def check_free(file: Path, job: str) -> None:
    """Raises InputError if another run is alive in the folder. Waits for a killed run to end.

    Args:
        job: name of this process's job. An earlier attempt at the same job on a lost machine is ignored, as the
            job's driver has given it up.
    """
    sign, deadline = find_liveness(file, exact=True), time.monotonic() + EXIT_WAIT_SECONDS
    while sign is not None and sign.holder is not None and sign.holder.is_ending_here and time.monotonic() < deadline:
        time.sleep(0.05)
        sign = find_liveness(file, exact=True)
    if sign is None or (not sign.is_certain and sign.holder is not None and job and sign.holder.job == job):
        return
    where = f"output={file.parent}: in use by another run ({sign})"
    if sign.is_certain:
        raise InputError(f"{where}: wait for it or end it, or choose another folder")
    left = DEAD_AFTER - sign.seconds
    raise InputError(
        f"{where}: wait for it or end it, or choose another folder; if that machine is down, wait {left:.0f} s, or "
        f"remove {file}"
    )


class RunLock:
    """Lock of a run directory, held from construction until `release` or the end of the process.

    Args:
        file: the lock file; its folder exists.
        job: name of this process's job; empty if it has none.

    Raises:
        InputError: another run is alive in the folder.
    """

    def __init__(self, file: Path, job: str):
        _release_earlier(file)
        check_free(file, job)
        self.file = file
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._own = Holder(socket.gethostname(), _machine(), os.getpid(), _start_of(os.getpid()), now, job)
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        found = os.fstat(self._descriptor)
        self._inode = (found.st_dev, found.st_ino)
        try:
            self._take()
        except BaseException:
            os.close(self._descriptor)
            raise
        _held[self._inode] = self
        atexit.register(self.release)
        self._end = threading.Event()
        threading.Thread(target=self._renew, name="run lock", daemon=True).start()

    def _take(self) -> None:
        deadline = time.monotonic() + PROBE_SECONDS
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:  # another process may only be testing the lock
                    time.sleep(0.05)
                    continue
                raise InputError(
                    f"output={self.file.parent}: another run has started there: wait for it or end it, or choose "
                    "another folder"
                ) from None
            except OSError:  # a file system without locks: rely on the file's content
                pass
            break
        with contextlib.suppress(OSError):  # a full disk is no reason to stop: the lock itself holds
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(dataclasses.asdict(self._own)).encode(), 0)
            os.fsync(self._descriptor)

    def _renew(self) -> None:
        while not self._end.wait(RENEWED_EVERY):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)

    def check_own(self) -> None:
        """Raises JobEndedError if another run has taken the folder, as after a long suspension on a file system
        without locks."""
        try:
            found, holder = self.file.stat(), _read(self._descriptor)
        except OSError:
            return
        if (found.st_dev, found.st_ino) != self._inode or holder not in (None, self._own):
            raise JobEndedError(
                f"error: output={self.file.parent}: another run has taken the folder ({holder or 'its lock is new'}): "
                "this one stops and overwrites nothing"
            )

    def release(self) -> None:
        """Releases the lock. Further calls do nothing."""
        if self._end.is_set():
            return
        self._end.set()
        atexit.unregister(self.release)
        with contextlib.suppress(OSError):
            if _read(self._descriptor) == self._own:
                os.ftruncate(self._descriptor, 0)
        _held.pop(self._inode, None)
        os.close(self._descriptor)


def _release_earlier(file: Path) -> None:
    with contextlib.suppress(OSError):
        found = file.stat()
        if (found.st_dev, found.st_ino) in _held:
            _held[found.st_dev, found.st_ino].release()


def _read(descriptor: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _is_held(descriptor: int) -> bool:
    """Whether another process holds the OS lock. Tested with a shared lock: all ranks test at once and must get the
    same result."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # locks are not supported
        return False
    return False


def _now_of(folder: Path) -> float:
    probe = folder / f".time_{socket.gethostname()}_{os.getpid()}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return time.time()
    return now


def _machine() -> str:
    parts = (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid"))
    with contextlib.suppress(OSError):
        return f"{parts[0].read_text().strip()} {os.readlink(parts[1])}"
    return f"{socket.gethostname()}"


def _start_of(pid: int) -> str:
    """Returns a local process's start time in clock ticks since boot; empty if there is no such process."""
    try:
        state, *fields = _stat_of(pid)
    except (OSError, ValueError):
        return ""
    return "" if state == "Z" else fields[18]


def _stat_of(pid: int) -> list[str]:
    """Fields of a process's stat file, from the state on. The command name before it may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _is_ending(pid: int) -> bool:
    """Whether a local process exists but is ending: its first thread has exited, or a SIGKILL is pending."""
    try:
        state, *fields = _stat_of(pid)
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except (OSError, ValueError):
        return False
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return state == "Z" or bool(int(fields[5]) & PF_EXITING) or bool(pending >> (signal.SIGKILL - 1) & 1)
