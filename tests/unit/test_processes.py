"""What a test starts is waited for while it gets on, and ends with the test."""

import sys

import pytest

from tests import processes
from tests.processes import Job, Patience, is_alive

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
BUSY = "import time; end = time.process_time() + 3\nwhile time.process_time() < end: pass"


def test_a_failing_test_leaves_no_process_behind() -> None:
    started: list[int] = []
    with pytest.raises(ZeroDivisionError):
        fail_beside_a_job(started)
    assert len(started) == 2
    assert not any(map(is_alive, started))


def fail_beside_a_job(started: list[int]) -> None:
    with Job([sys.executable, "-c", PARENT]) as job:
        assert job.wait_until(lambda: len(job.processes()) == 2)
        started += job.processes()
        raise ZeroDivisionError


def test_a_job_that_comes_to_a_halt_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "QUIET_SECONDS", 0.5)
    with pytest.raises(AssertionError, match="come to a halt"), Job(["sleep", "600"]) as job:
        job.finish()


def test_a_job_that_gets_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10**9, 100))
    monkeypatch.setattr(processes, "QUIET_SECONDS", 250)
    monkeypatch.setattr(processes.time, "monotonic", lambda: next(now))
    used = iter([0.0, 0.4, 1.1, 1.5, 2.2, 2.3, 2.3, 2.3])
    monkeypatch.setattr(processes, "processor_seconds", lambda _: next(used))
    patience = Patience(lambda: [1])
    assert [patience.is_over for _ in range(7)] == [False] * 6 + [True]


def test_a_job_may_use_so_much_processor_time() -> None:
    with Job([sys.executable, "-c", BUSY]) as job:
        patience = Patience(job.processes, most_seconds=1.0)
        assert job.wait_until(lambda: patience.is_over)
        assert job.process.poll() is None
