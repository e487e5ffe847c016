"""No rank waits for a dead one: one that fails, hangs or is gone is made known, and its peers leave, even from inside a
collective.

gloo notices a closed connection at once, NCCL does not: a peer stays blocked on the device until its time-out. So every
rank has a thread that looks into the job's store. On each machine one rank also looks whether the others are there.
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
from automodel_rl.launch.flight import flight, last_place, left_flight
from automodel_rl.launch.record import (
    RECORD_FOLDER_VARIABLE,
    FailureRecord,
    from_json,
    leave_record,
    own_rank,
)

POLL_SECONDS = 1.0

GRACE_SECONDS = 5.0
"""How long a peer may take to end by itself, with a message of its own, once another rank has failed."""

TELL_SECONDS = 2.0
"""How long other ranks leave it to rank 0 to show the failure."""

PARTS = ("batch", "checkpoint", "engine", "losses", "model", "parallel", "weight_sync")

WAITING = ("/torch/", *(f"/automodel_rl/{part}/" for part in PARTS))
"""Where the main thread is while it waits for peers, or for a device that does."""

STORE_SECONDS = 20.0
"""How long a rank may live on when the rank or agent with the store has ended, which is the last to end well."""

hang_seconds: float | None = 60 * 60.0
"""Without a note in the flight recorder for so long, a rank counts as hanging; None never."""


def set_hang_limit(minutes: float | None) -> None:
    """Sets how long a rank may do the same thing. Before the process group is joined."""
    global hang_seconds
    hang_seconds = None if minutes is None else 60 * minutes


attempt = "0"
"""Name of this attempt at the job: the store may have the words of attempts before."""

is_guarded = False
"""Whether this process does nothing but its rank's work, and may be ended when the job is over."""


def _key(name: str) -> str:
    return f"automodel_rl/{attempt}/{name}"


def report_failure(record: FailureRecord) -> None:
    """Leaves a record with the launcher, or tells the peers and shows what failed first, once in the job."""
    folder = os.environ.get(RECORD_FOLDER_VARIABLE)
    if folder is not None:
        leave_record(Path(folder), record)
    store = None
    with contextlib.suppress(Exception):  # this rank may not have joined the job, or its store is gone
        store = _connect(timeout_seconds=3)
        if record.is_lost_peer and folder is None:
            _wait_for_cause(store)
        store.compare_set(_key("failed"), "", record.to_json())
    if folder is None:
        _show_once(store, record)


def leave() -> None:
    """Says that this rank ends well."""
    with contextlib.suppress(Exception):
        _connect(timeout_seconds=3).set(_key(f"left/{own_rank()}"), "1")


def watch_peers() -> None:
    """Watches over the job from a thread; ends this process some seconds after another rank has failed."""
    threading.Thread(target=_watch, daemon=True, name="peer-watch").start()


def _wait_for_cause(store: Any) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while not store.check([_key("failed")]) and time.monotonic() < deadline:
        time.sleep(0.1)


def _show_once(store: Any, record: FailureRecord) -> None:
    """Shows the job's first failure on rank 0's terminal, or on another one's if rank 0 is gone."""
    if store is None:
        print(record.block(), file=sys.stderr, flush=True)
        return
    with contextlib.suppress(Exception):
        if own_rank() != 0:
            time.sleep(TELL_SECONDS)
        if store.add(_key("shown"), 1) > 1:
            return
        record = from_json(store.get(_key("failed")).decode())
    print(record.block(), file=sys.stderr, flush=True)


def _watch() -> None:
    store = _connect(timeout_seconds=60)
    host = socket.gethostname()
    warden = _Warden(store, host)
    hang = _HangWatch(store)
    try:
        store.append(_key(f"host/{host}"), f"{own_rank()}:{os.getpid()} ")
        while not store.check([_key("failed")]):
            time.sleep(POLL_SECONDS)
            warden.look()
            hang.look()
        record = from_json(store.get(_key("failed")).decode())
    except RuntimeError:  # the rank or agent that holds the store has ended, perhaps because all is done
        if is_guarded:
            time.sleep(STORE_SECONDS)
            print(f"error: rank {own_rank()}: the job's store is gone, and with it a rank", file=sys.stderr, flush=True)
            _write_stacks()
            os._exit(EXIT_FAILURE)
        return
    time.sleep(GRACE_SECONDS)
    if RECORD_FOLDER_VARIABLE not in os.environ:
        _show_once(store, record)
    _write_stacks()
    os._exit(EXIT_FAILURE)


class _Warden:
    """Looks whether the ranks of this machine are there, if this rank is the first of them that lives."""

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
            # A number that never lived is of another machine that has the same name.
            elif rank in self.seen and not self.store.check([_key(f"left/{rank}")]):
                self.store.compare_set(_key("failed"), "", _record_of_dead(rank, pid).to_json())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):  # on Linux, a process that nobody has waited for yet
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
    """Notices that this rank has not got on for long. A rank that waits leaves it to the one that it waits for."""

    def __init__(self, store: Any):
        self.store, self.started = store, time.monotonic()

    def look(self) -> None:
        if hang_seconds is None:
            return
        still = time.monotonic() - max(flight.last_note, self.started)  # what comes before, imports say, may take long
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
    """Whether the innermost code, but for that of locks and threads, is where ranks wait."""
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is not None and any(part in frame.f_code.co_filename for part in WAITING)


def _write_stacks() -> None:
    """The stacks of all threads, beside the flight recorder's file."""
    if flight.file is not None:
        with contextlib.suppress(OSError), flight.file.with_suffix(".stacks").open("w") as file:
            faulthandler.dump_traceback(file)


def _connect(timeout_seconds: float) -> Any:
    """A connection of its own, for the process group's is in use by other threads."""
    from torch import distributed as dist  # late: the launcher imports this module and must not wait for torch

    if not dist.is_initialized():
        raise RuntimeError("this rank has not joined the job")
    timeout = datetime.timedelta(seconds=timeout_seconds)
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
