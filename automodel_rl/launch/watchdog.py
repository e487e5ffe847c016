"""Watches the ranks of a job, so that no rank waits for a dead one.

When a rank fails, hangs or disappears, this is recorded in the job's store, and its peers exit, even from inside a
collective. gloo notices a closed connection at once, but NCCL leaves peers blocked on the device until its timeout.
So every rank has a thread that polls the job's store. On each machine one rank also checks whether the others are
alive.

The thread ends before its rank does: the process would abort if the interpreter exited while the thread is in
torch's C++.
"""

import contextlib
import datetime
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from automodel_rl.errors import EXIT_FAILURE
from automodel_rl.launch.attempt import is_started_by_agent
from automodel_rl.launch.flight import flight, last_phase, left_flight
from automodel_rl.launch.record import (
    RECORD_FOLDER_VARIABLE,
    FailureRecord,
    from_json,
    leave_record,
    own_rank,
    show,
)

POLL_SECONDS = 1.0

GRACE_SECONDS = 5.0
"""Time a peer has to end by itself, with its own message, after another rank has failed."""

SHOW_SECONDS = 2.0
"""Time rank 0 has to print the failure before another rank does."""

EXIT_WAIT_SECONDS = 3.0
"""Longest time the rank with the store waits for the others to end, in a process that is not guarded."""

GUARDED_EXIT_WAIT_SECONDS = 600.0
"""The same in a guarded process, whose watch notices every failure except the loss of a whole machine."""

EXIT_POLL_SECONDS = 0.02

PACKAGE = Path(__file__).parents[1]

OWN_WORK = tuple(
    f"{PACKAGE / room}{os.sep}"
    for room in ("config", "data", "launch", "observe", "quickstart", "rollout", "tools", "trainers")
)
"""Folders whose code runs locally or waits for local processes. Code elsewhere in the package, and in torch, waits
for peers or for a device that waits for peers."""

STORE_SECONDS = 20.0
"""Time a rank may outlive the store. In a successful job the store is the last to end."""

hang_seconds: float | None = 60 * 60.0
"""Time without a flight recorder note after which a rank counts as hanging. None: never."""


def set_hang_limit(minutes: float | None) -> None:
    """Sets how long a rank may stay without progress; None for no limit. Call it before joining the process group."""
    global hang_seconds
    hang_seconds = None if minutes is None else 60 * minutes


attempt = "0"
"""Name of this attempt at the job, as the store may still hold the messages of earlier attempts."""

is_guarded = False
"""Whether this process only runs a rank, and so may be killed with the job."""


def _key(name: str) -> str:
    return f"automodel_rl/{attempt}/{name}"


def report_failure(record: FailureRecord) -> None:
    """Reports a failure to peers and to the launcher. Without a launcher, prints the job's first failure, once per
    job."""
    folder = os.environ.get(RECORD_FOLDER_VARIABLE)
    if folder is not None:
        leave_record(Path(folder), record)
    store = None if _watch is None else _watch.store  # None: this rank has not joined the job
    if store is not None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            if record.is_lost_peer and folder is None:
                _wait_for_cause(store)
            store.compare_set(_key("failed"), "", record.to_json())
    if folder is None:
        _show_once(store, record)


def watch_peers(store: Any) -> None:
    """Starts a thread that watches the job and ends this process a few seconds after another rank has failed.

    Args:
        store: the job's store, kept referenced until this rank leaves, as it may be the server.
    """
    global _watch
    _watch = _Watch(store)
    _watch.thread.start()


def leave() -> None:
    """Records that this rank ended well, stops the watch, and releases the store. Further calls do nothing."""
    global _watch
    if _watch is not None:
        _watch.end()
        _watch = None


def _wait_for_cause(store: Any) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while not store.check([_key("failed")]) and time.monotonic() < deadline:
        time.sleep(0.1)


def _show_once(store: Any, record: FailureRecord) -> None:
    if store is None:
        show(record)
        return
    with contextlib.suppress(Exception):
        if own_rank() != 0:
            time.sleep(SHOW_SECONDS)
        if store.add(_key("shown"), 1) > 1:
            return
        record = from_json(store.get(_key("failed")).decode())
    show(record)


class _Watch:
    """One rank's watch over its job.

    Attributes:
        store: a separate connection to the job's store, as other threads use the process group's.
    """

    def __init__(self, jobs_store: Any):
        self._jobs_store = jobs_store
        self.store = _connect()
        self._ends = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name="peer-watch")

    def end(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.store.set(_key(f"left/{own_rank()}"), "1")
            if own_rank() == 0 and not is_started_by_agent():
                self._wait_for_others()
        self._ends.set()
        self.thread.join()

    def _wait_for_others(self) -> None:
        """Waits for the other ranks, because the store ends with this one. The watch notices ranks that fail or
        hang."""
        left = [_key(f"left/{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
        deadline = time.monotonic() + (GUARDED_EXIT_WAIT_SECONDS if is_guarded else EXIT_WAIT_SECONDS)
        with flight.phase("waiting for the other ranks to end"):
            while not self.store.check(left) and time.monotonic() < deadline:
                time.sleep(EXIT_POLL_SECONDS)
            if is_guarded and not self.store.check(left):
                print(
                    "warning: this rank is done, but not all others have reported that they are",
                    file=sys.stderr,
                    flush=True,
                )

    def _run(self) -> None:
        host = socket.gethostname()
        warden = _LivenessCheck(self.store, host)
        hang = _HangWatch()
        try:
            self.store.append(_key(f"host/{host}"), f"{own_rank()}:{os.getpid()} ")
            while not self.store.check([_key("failed")]):
                if self._ends.wait(POLL_SECONDS):
                    return
                warden.check()
                hang.check()
            record = from_json(self.store.get(_key("failed")).decode())
        except RuntimeError:  # the rank or agent with the store has ended, perhaps because the job is done
            if is_guarded and not self._ends.wait(STORE_SECONDS):
                line = f"error: rank {own_rank()}: the job's store is unreachable: the process that hosts it has exited"
                print(line, file=sys.stderr, flush=True)
                _write_stacks()
                os._exit(EXIT_FAILURE)
            return
        if self._ends.wait(GRACE_SECONDS):
            return
        if RECORD_FOLDER_VARIABLE not in os.environ:
            _show_once(self.store, record)
        _write_stacks()
        os._exit(EXIT_FAILURE)


_watch: _Watch | None = None


class _LivenessCheck:
    """Checks whether this machine's ranks are alive. Only the first live rank does so."""

    def __init__(self, store: Any, host: str):
        self.store, self.host = store, host
        self.seen: dict[int, int] = {}

    def check(self) -> None:
        ranks = [entry.split(":") for entry in self.store.get(_key(f"host/{self.host}")).decode().split()]
        if next((int(pid) for _, pid in ranks if _is_alive(int(pid))), None) != os.getpid():
            return
        for rank, pid in ((int(rank), int(pid)) for rank, pid in ranks):
            if _is_alive(pid):
                self.seen[rank] = pid
            # A process never seen alive belongs to another machine with the same name.
            elif rank in self.seen and not self.store.check([_key(f"left/{rank}")]):
                self.store.compare_set(_key("failed"), "", _record_of_dead(rank, pid).to_json())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):  # on Linux a dead process remains a zombie (Z) until it is waited for
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _record_of_dead(rank: int, pid: int) -> FailureRecord:
    file = left_flight(None if flight.file is None else flight.file.parent, rank, flight.started)
    return FailureRecord(
        rank,
        EXIT_FAILURE,
        f"error: rank {rank} exited without reporting an error; it was killed, perhaps because the machine ran out of "
        "memory",
        where="" if file is None else last_phase(file),
        pid=pid,
        flight=str(file or ""),
    )


class _HangWatch:
    """Detects a rank without progress. One that waits for peers gets 1.5 times the limit, so that the peer reports
    first."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def check(self) -> None:
        if hang_seconds is None:
            return
        still = time.monotonic() - max(flight.last_note, self.started)  # imports may have taken long before
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if still < hang_seconds or (_waits(frame) and still < 1.5 * hang_seconds):
            return
        what = "waits for other ranks" if _waits(frame) else "hangs"
        record = FailureRecord(
            own_rank(),
            EXIT_FAILURE,
            f"error: rank {own_rank()} {what}: {still / 60:.3g} minutes in {flight.where or 'starting'}; if this is "
            "expected, raise failures.hang_minutes",
            trace="".join(traceback.format_stack(frame)),
        )
        report_failure(record)
        _write_stacks()
        if RECORD_FOLDER_VARIABLE in os.environ:
            os._exit(EXIT_FAILURE)


def _waits(frame: FrameType | None) -> bool:
    """Whether a thread waits for peers, judged by its innermost frame outside the threading module."""
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    is_ours = file.startswith(f"{PACKAGE}{os.sep}") and not file.startswith(OWN_WORK)
    return is_ours or "/torch/" in file or file == __file__


def _write_stacks() -> None:
    if flight.file is not None:
        with contextlib.suppress(OSError), flight.file.with_suffix(".stacks").open("w") as file:
            faulthandler.dump_traceback(file)


def _connect() -> Any:
    from torch import distributed as dist  # deferred: the launcher imports this module and must not wait for torch

    timeout = datetime.timedelta(seconds=60)
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
