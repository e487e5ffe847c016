"""The lock of a run directory: at most one run works in it, on whatever machine.

The file says which process holds the lock. While the run lives, the process has a lock of the operating system on the
file, which ends with it, and renews the file's modification time. Either may fail to tell: a lock may be unknown on
other machines, or to the file system, and a process that another machine's file names cannot be asked. So:

- a lock that is held means a run that lives, also one that is stopped
- a process of this machine is looked up, by its number and its start
- a process that has been killed may hold its lock for a while: its threads end one after the other, and one that writes
  to a busy disk goes last
- of another machine's process the modification time decides, by the clock of the folder's own file system
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
"""Seconds between two renewals of the modification time."""

DEAD_AFTER = 300.0
"""Seconds without a renewal after which a run on another machine counts as dead."""

ASKING = 2.0
"""Longest time in seconds for which somebody may hold the lock only to ask whether it is free."""

ENDING = 60.0
"""Longest time in seconds for which a process that has been killed is waited for."""

PF_EXITING = 0x4
"""Flag of a thread that ends (`include/linux/sched.h`)."""

JOB_VARIABLE = "AUTOMODEL_RL_JOB"
"""Environment variable with a name of the job that is the same when its driver starts it again."""

_held: dict[tuple[int, int], "RunLock"] = {}
"""The locks of this process by device and inode. Closing a file anew that is locked would let go of the lock."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host: its machine.
        machine: a name of the machine's start and of the process's namespace; processes with the same can be looked up.
        pid: its number.
        started: when it started, in the machine's own count.
        since: when it took the lock, as a text.
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
        """Whether it is, or was, a process that can be looked up here."""
        return self.machine == _machine()

    @property
    def is_alive_here(self) -> bool:
        """Whether the process is there, if it can be looked up here."""
        return self.is_here and self.started != "" and _start_of(self.pid) == self.started

    @property
    def is_ending_here(self) -> bool:
        """Whether the process has been killed but has not let go of all it had, if it can be looked up here."""
        return self.is_here and _is_ending(self.pid)

    @property
    def is_this_process(self) -> bool:
        return self.is_here and self.pid == os.getpid()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@dataclass(frozen=True)
class Sign:
    """A sign of life of a run that is not this process's.

    Attributes:
        holder: what the file says; None if it does not say it.
        seconds: seconds since the last renewal.
        is_certain: whether it is known to live; else only its last renewal says so.
    """

    holder: Holder | None
    seconds: float
    is_certain: bool

    def __str__(self) -> str:
        return f"{self.holder or 'a process that has not said its name'}, last alive {max(self.seconds, 0):.0f} s ago"


def sign_of_life(file: Path, *, exact: bool = False) -> Sign | None:
    """A sign that a run of another process works in a folder; None if there is none.

    Args:
        file: the lock's file.
        exact: whether to ask the folder's own file system for the time, by a file that is made and removed there; else
            this machine's clock is taken.
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
        return Sign(holder, time.time() - found.st_mtime, is_certain=True)
    if holder is None or holder.is_here:
        return None
    seconds = (_now_of(file.parent) if exact else time.time()) - found.st_mtime
    return None if seconds > DEAD_AFTER else Sign(holder, seconds, is_certain=False)


def check_free(file: Path, job: str) -> None:
    """Raises InputError if another run lives in a folder. A run that has been killed is waited for.

    Args:
        file: the lock's file.
        job: the name of this process's job. An attempt at the same job on a machine that is gone does not count, for
            its driver has given it up.
    """
    sign, deadline = sign_of_life(file, exact=True), time.monotonic() + ENDING
    while sign is not None and sign.holder is not None and sign.holder.is_ending_here and time.monotonic() < deadline:
        time.sleep(0.05)
        sign = sign_of_life(file, exact=True)
    if sign is None or (not sign.is_certain and sign.holder is not None and job and sign.holder.job == job):
        return
    where = f"output={file.parent}: a run is at work there ({sign})"
    if sign.is_certain:
        raise InputError(f"{where}: wait for it or end it, or choose another folder")
    left = DEAD_AFTER - sign.seconds
    raise InputError(
        f"{where}: wait for it or end it, or choose another folder; if that machine is gone, wait {left:.0f} s, or "
        f"remove {file}"
    )


class RunLock:
    """Holds the lock of a run directory from its making until `release`, or the end of the process.

    Args:
        file: the lock's file; its folder is there.
        job: the name of this process's job; empty if it has none.

    Raises:
        InputError: another run lives in the folder.
    """

    def __init__(self, file: Path, job: str):
        _let_go_before(file)
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
        deadline = time.monotonic() + ASKING
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:  # somebody may only ask
                    time.sleep(0.05)
                    continue
                raise InputError(
                    f"output={self.file.parent}: another run has begun to work there: wait for it or end it, or choose "
                    "another folder"
                ) from None
            except OSError:  # a file system without locks: what the file says must do
                pass
            break
        with contextlib.suppress(OSError):  # a full disk is no reason to end: the lock itself holds
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(dataclasses.asdict(self._own)).encode(), 0)
            os.fsync(self._descriptor)

    def _renew(self) -> None:
        while not self._end.wait(RENEWED_EVERY):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)

    def check_own(self) -> None:
        """Raises JobEndedError if another run has taken the folder, as after a long stop on a file system without
        locks."""
        try:
            found, holder = self.file.stat(), _read(self._descriptor)
        except OSError:
            return
        if (found.st_dev, found.st_ino) != self._inode or holder not in (None, self._own):
            raise JobEndedError(
                f"error: output={self.file.parent}: another run has taken the folder ({holder or 'its lock is new'}): "
                "this one ends, so that it spoils nothing"
            )

    def release(self) -> None:
        """Lets go of the lock. It may be called again."""
        if self._end.is_set():
            return
        self._end.set()
        atexit.unregister(self.release)
        with contextlib.suppress(OSError):
            if _read(self._descriptor) == self._own:
                os.ftruncate(self._descriptor, 0)
        _held.pop(self._inode, None)
        os.close(self._descriptor)


def _let_go_before(file: Path) -> None:
    """Lets go of a lock that this process has left on the file, of a run that has ended with an exception."""
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
    """Whether another process has the operating system's lock. A shared lock asks: all ranks look at once, and must see
    the same."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks there
        return False
    return False


def _now_of(folder: Path) -> float:
    """The time by the clock of the folder's file system."""
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
    """When a process of this machine started, in the machine's own count; empty if there is none."""
    try:
        state, *fields = _stat_of(pid)
    except (OSError, ValueError):
        return ""
    return "" if state == "Z" else fields[18]


def _stat_of(pid: int) -> list[str]:
    """Fields of a process's status, from its state on. The command's name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _is_ending(pid: int) -> bool:
    """Whether a process of this machine is there and cannot go on: its first thread has ended, or a kill waits for
    it."""
    try:
        state, *fields = _stat_of(pid)
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except (OSError, ValueError):
        return False
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return state == "Z" or bool(int(fields[5]) & PF_EXITING) or bool(pending >> (signal.SIGKILL - 1) & 1)
