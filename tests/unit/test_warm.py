"""A fork of Python that has imported libraries and the package is, but for its haste, a Python of its own."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes import Job, run_command
from tests.warm import CAN_FORK, WarmProcess, cold

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="this machine has CUDA devices")

COMMAND = [sys.executable, "-m", "tests.unit.about_itself", "3"]


def test_a_fork_knows_of_itself_what_a_python_of_its_own_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONLY_THIS_TEST_SETS_IT", "1")
    fork, own = (run_command(command, env=dict(os.environ)) for command in (COMMAND, cold(COMMAND)))
    assert fork.returncode == own.returncode == 3
    assert fork.stderr == own.stderr == "to the other stream\n"
    (said, end), (expected, expected_end) = fork.stdout.splitlines(), own.stdout.splitlines()
    assert end == expected_end == "at the end"
    assert json.loads(said) == json.loads(expected)


def test_a_fork_that_is_killed_or_fails_ends_with_the_code_of_it() -> None:
    with Job([sys.executable, "-m", "timeit", "-n", "1", "import time; time.sleep(600)"]) as job:
        job.process.send_signal(signal.SIGKILL)
        assert job.finish() == -signal.SIGKILL
    failed = run_command([sys.executable, "-m", "no_such_module"])
    assert failed.returncode == 1
    assert "No module named no_such_module" in failed.stderr


def test_a_fork_has_the_descriptors_that_it_is_given() -> None:
    ours, theirs = os.pipe()
    source = f"import os; os.write({theirs}, b'x')"
    process = WarmProcess([sys.executable, "-m", "timeit", "-n", "1", "-r", "1", source], stdout=2, pass_fds=[theirs])
    os.close(theirs)
    assert process.wait() == 0
    assert os.read(ours, 9) == b"x"
    assert os.read(ours, 9) == b"", "somebody holds the other end"
    os.close(ours)


def test_threads_may_wait_for_a_fork_together() -> None:
    process = WarmProcess([sys.executable, "-m", "timeit", "-n", "1", "import time; time.sleep(600)"])
    with ThreadPoolExecutor(4) as pool:
        codes = [pool.submit(process.wait) for _ in range(4)]
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        assert [code.result() for code in codes] == [-signal.SIGKILL] * 4
