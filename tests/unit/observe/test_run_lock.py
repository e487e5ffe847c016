"""One run at a time works in a folder, on whatever machine; a run that is dead is in nobody's way."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from automodel_rl.errors import InputError, JobEndedError
from automodel_rl.observe import run_lock
from automodel_rl.observe.run_lock import DEAD_AFTER, Holder, RunLock, check_free, find_liveness
from tests.processes import is_alive

HOLD = """
import fcntl, sys
from pathlib import Path
from automodel_rl.observe.run_lock import RunLock
if sys.argv[2] == "no locks":
    def lockf(*_):
        raise OSError(37, "No locks available")
    fcntl.lockf = lockf
RunLock(Path(sys.argv[1]), "")
print(flush=True)
input()
"""

HOLD_WHILE_ENDING = """
import ctypes, os, sys, threading
from pathlib import Path
from automodel_rl.observe.run_lock import RunLock
RunLock(Path(sys.argv[1]), "")
threading.Thread(target=lambda: (sys.stdin.readline(), os._exit(0))).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""

HAVE_LOCKS = pytest.mark.parametrize("locks", ["locks", "no locks"])


def no_locks(*_: object) -> None:
    raise OSError(37, "No locks available")


@contextlib.contextmanager
def run_at_work(file: Path, locks: str) -> Iterator[subprocess.Popen]:
    """Another process that holds the lock, on a file system with locks or without."""
    command = [sys.executable, "-c", HOLD, str(file), locks]
    without = mock.patch.object(run_lock.fcntl, "lockf", no_locks) if locks == "no locks" else contextlib.nullcontext()
    with without, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            yield other
        finally:
            other.kill()


@HAVE_LOCKS
def test_a_run_that_lives_or_is_stopped_is_in_the_way_until_it_is_killed(tmp_path: Path, locks: str) -> None:
    file = tmp_path / ".in_use"
    with run_at_work(file, locks) as other:
        for number in (signal.SIGCONT, signal.SIGSTOP):
            other.send_signal(number)
            os.utime(file, (0, 0))  # a run that is stopped renews nothing
            with pytest.raises(InputError, match=rf"^output={tmp_path}: in use by another run .process {other.pid} "):
                RunLock(file, "")
        other.kill()
        other.wait()
        RunLock(file, "").release()
    assert find_liveness(file) is None


def test_a_run_that_has_been_killed_is_waited_for_until_its_last_thread_has_let_go(tmp_path: Path) -> None:
    file = tmp_path / ".in_use"
    command = [sys.executable, "-c", HOLD_WHILE_ENDING, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        while not Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].startswith(" Z"):
            time.sleep(0.01)
        assert find_liveness(file) is not None
        assert is_alive(other.pid)
        taken = ThreadPoolExecutor().submit(check_free, file, "")
        time.sleep(0.3)
        assert not taken.done()
        other.stdin.close()
        assert taken.result() is None
    assert not is_alive(other.pid)


def of_another_machine(file: Path, age: float, job: str = "") -> Holder:
    holder = Holder("node-7", "another boot", os.getpid(), "1", "2026-11-25 12:00:00 +0000", job)
    file.write_text(json.dumps(dataclasses.asdict(holder)))
    now = file.stat().st_mtime
    os.utime(file, (now - age, now - age))
    return holder


def test_a_run_of_another_machine_lives_while_it_renews_its_file(tmp_path: Path) -> None:
    file = tmp_path / ".in_use"
    of_another_machine(file, age=40)
    with pytest.raises(InputError, match=r"on node-7, since 2026-11-25 12:00:00 \+0000, last alive 4\d s ago.*remove"):
        check_free(file, "")
    assert list(tmp_path.iterdir()) == [file]
    of_another_machine(file, age=DEAD_AFTER + 5)
    check_free(file, "")
    of_another_machine(file, age=40, job="one")
    check_free(file, "one")  # started again by its driver
    with pytest.raises(InputError):
        check_free(file, "two")


def test_the_clock_is_that_of_the_folder(tmp_path: Path) -> None:
    file = tmp_path / ".in_use"
    of_another_machine(file, age=40)
    with mock.patch.object(run_lock.time, "time", return_value=file.stat().st_mtime + 10 * DEAD_AFTER):
        with pytest.raises(InputError):
            check_free(file, "")


def test_a_run_that_was_taken_for_dead_ends_before_it_spoils_anything(tmp_path: Path) -> None:
    file = tmp_path / ".in_use"
    lock = RunLock(file, "")
    lock.check_own()
    of_another_machine(file, age=0)
    with pytest.raises(JobEndedError, match="another run has taken the folder .*node-7"):
        lock.check_own()
    lock.release()
    assert "node-7" in file.read_text()  # it is not ours to empty


def test_a_lock_that_is_let_go_is_free_everywhere(tmp_path: Path) -> None:
    file = tmp_path / ".in_use"
    lock = RunLock(file, "")
    lock.release()
    lock.release()
    assert file.read_text() == ""
    with mock.patch.object(run_lock, "_machine", return_value="another machine"):
        check_free(file, "")


def test_a_number_that_another_process_has_got_is_no_run(tmp_path: Path) -> None:
    file = tmp_path / ".in_use"
    holder = dataclasses.replace(of_another_machine(file, 0), machine=run_lock._machine(), pid=os.getppid())
    file.write_text(json.dumps(dataclasses.asdict(holder)))
    check_free(file, "")
