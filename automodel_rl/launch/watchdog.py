"""Watches over the ranks of a job, so that none waits for a dead one.

When a rank fails, hangs or is gone, the job's store says so, and its peers leave, even from inside a collective.

gloo notices a closed connection at once. NCCL does not: a peer stays blocked on the device until its time-out. So every
rank has a thread that looks into the job's store. On each machine one rank also looks whether the others are alive.

The thread ends before its rank does: if the interpreter ends while a thread is in torch's C++, the process aborts.
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
from automodel_rl.launch.flight import flight, last_place, left_flight
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
"""Time that a peer has to end by itself, with a message of its own, once another rank has failed."""

SHOW_SECONDS = 2.0
"""Time that rank 0 has to show the failure before another rank does."""

FAREWELL_SECONDS = 3.0
"""Longest wait of the rank with the store for the others to end, if it cannot know whether all went well."""

LONGEST_FAREWELL_SECONDS = 600.0
"""The same for a guarded process. Its watch notices all that goes wrong except the end of a whole machine."""

FAREWELL_POLL_SECONDS = 0.02

PACKAGE = Path(__file__).parents[1]

OWN_WORK = tuple(
    f"{PACKAGE / room}{os.sep}"
    for room in ("config", "data", "launch", "observe", "quickstart", "rollout", "tools", "trainers")
)
"""Rooms in which a rank does work of its own or waits for processes of its own. Elsewhere in the package, and in torch,
it waits for peers, or for a device that waits for peers."""

STORE_SECONDS = 20.0
"""Time that a rank may live on after the rank or agent with the store has ended. In a good end that one is the last."""

hang_seconds: float | None = 60 * 60.0
"""Time without a note in the flight recorder after which a rank counts as hanging; None for never."""


def set_hang_limit(minutes: float | None) -> None:
    """Sets how long a rank may do the same thing. Call it before the process group is joined."""
    global hang_seconds
    hang_seconds = None if minutes is None else 60 * minutes


attempt = "0"
"""Name of this attempt at the job. The store may still have the messages of earlier attempts."""

is_guarded = False
"""Whether this process does nothing but its rank's work, so that it may be ended with the job."""


def _key(name: str) -> str:
    return f"automodel_rl/{attempt}/{name}"


def report_failure(record: FailureRecord) -> None:
    """Leaves a failure for peers and launcher. Without a launcher it shows the first failure, once in the job."""
    folder = os.environ.get(RECORD_FOLDER_VARIABLE)
    if folder is not None:
        leave_record(Path(folder), record)
    store = None if _watch is None else _watch.store  # this rank may not have joined the job
    if store is not None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            if record.is_lost_peer and folder is None:
                _wait_for_cause(store)
            store.compare_set(_key("failed"), "", record.to_json())
    if folder is None:
        _show_once(store, record)


def watch_peers(store: Any) -> None:
    """Watches over the job from a thread; ends this process some seconds after another rank has failed.

    Args:
        store: the job's store. It is held until this rank leaves, for it may be the one that serves the others.
    """
    global _watch
    _watch = _Watch(store)
    _watch.thread.start()


def leave() -> None:
    """Notes that this rank ends well, ends the watch, and lets go of the store. A second call does nothing."""
    global _watch
    if _watch is not None:
        _watch.end()
        _watch = None


def _wait_for_cause(store: Any) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while not store.check([_key("failed")]) and time.monotonic() < deadline:
        time.sleep(0.1)


def _show_once(store: Any, record: FailureRecord) -> None:
    """Shows the job's first failure on rank 0's terminal, or on another one's if rank 0 is gone."""
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
    """This rank's watch over its job.

    Attributes:
        store: the job's store, over a connection of its own: other threads use the process group's.
        thread: the thread that looks into the store.
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
        """Waits for the other ranks, because the store ends with this rank. The watch notices if one fails or hangs."""
        left = [_key(f"left/{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
        deadline = time.monotonic() + (LONGEST_FAREWELL_SECONDS if is_guarded else FAREWELL_SECONDS)
        with flight.phase("waiting for the other ranks to end"):
            while not self.store.check(left) and time.monotonic() < deadline:
                time.sleep(FAREWELL_POLL_SECONDS)
            if is_guarded and not self.store.check(left):
                print("warning: not all ranks have said that they are done; this one is", file=sys.stderr, flush=True)

    def _run(self) -> None:
        host = socket.gethostname()
        warden = _Warden(self.store, host)
        hang = _HangWatch()
        try:
            self.store.append(_key(f"host/{host}"), f"{own_rank()}:{os.getpid()} ")
            while not self.store.check([_key("failed")]):
                if self._ends.wait(POLL_SECONDS):
                    return
                warden.look()
                hang.look()
            record = from_json(self.store.get(_key("failed")).decode())
        except RuntimeError:  # the rank or agent that holds the store has ended, perhaps because all is done
            if is_guarded and not self._ends.wait(STORE_SECONDS):
                line = f"error: rank {own_rank()}: the job's store is gone, and with it a rank"
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
"""This rank's watch, from when it joins its job until it leaves."""


class _Warden:
    """Looks whether the ranks of this machine are alive. Only the first rank that is alive looks."""

    def __init__(self, store: Any, host: str):
        self.store, self.host = store, host
        self.seen: dict[int, int] = {}

    def look(self) -> None:
        ranks = [entry.split(":") for entry in self.store.get(_key(f"host/{self.host}")).decode().split()]
        if next((int(pid) for _, pid in ranks if _is_alive(int(pid))), None) != os.getpid():
            return
        for rank, pid in ((int(rank), int(pid)) for rank, pid in ranks):
            if _is_alive(pid):
                self.seen[rank] = pid
            # A process that was never seen alive is on another machine with the same name.
            elif rank in self.seen and not self.store.check([_key(f"left/{rank}")]):
                self.store.compare_set(_key("failed"), "", _record_of_dead(rank, pid).to_json())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):  # on Linux a dead process stays as Z until it is waited for
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _record_of_dead(rank: int, pid: int) -> FailureRecord:
    file = left_flight(None if flight.file is None else flight.file.parent, rank, flight.started)
    return FailureRecord(
        rank,
        EXIT_FAILURE,
        f"error: rank {rank} is gone without a word; it was killed, perhaps because the machine ran out of memory",
        where="" if file is None else last_place(file),
        pid=pid,
        flight=str(file or ""),
    )


class _HangWatch:
    """Notices if this rank makes no progress for long. A rank that waits for others gives them time to report first."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def look(self) -> None:
        if hang_seconds is None:
            return
        still = time.monotonic() - max(flight.last_note, self.started)  # imports and the like may take long before
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if still < hang_seconds or (_waits(frame) and still < 1.5 * hang_seconds):
            return
        what = "waits for other ranks" if _waits(frame) else "hangs"
        record = FailureRecord(
            own_rank(),
            EXIT_FAILURE,
            f"error: rank {own_rank()} {what}: {still / 60:.3g} minutes in {flight.where or 'starting'}; if that is "
            "not too long, raise failures.hang_minutes",
            trace="".join(traceback.format_stack(frame)),
        )
        report_failure(record)
        _write_stacks()
        if RECORD_FOLDER_VARIABLE in os.environ:
            os._exit(EXIT_FAILURE)


def _waits(frame: FrameType | None) -> bool:
    """Whether a thread waits for peers, by its innermost code other than that of locks and threads."""
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    is_ours = file.startswith(f"{PACKAGE}{os.sep}") and not file.startswith(OWN_WORK)
    return is_ours or "/torch/" in file or file == __file__


def _write_stacks() -> None:
    """Writes the stacks of all threads to a file beside the flight recorder's."""
    if flight.file is not None:
        with contextlib.suppress(OSError), flight.file.with_suffix(".stacks").open("w") as file:
            faulthandler.dump_traceback(file)


def _connect() -> Any:
    from torch import distributed as dist  # late: the launcher imports this module and must not wait for torch

    timeout = datetime.timedelta(seconds=60)
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
