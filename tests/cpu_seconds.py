"""CPU seconds of each test, against those on record in durations.json: `make test` fails where tests without a record
take more than 5. `pytest --record-durations MACHINE` writes the record.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).with_name("durations.json")

MAX_UNRECORDED = 5.0
"""CPU seconds of all tests without a record."""

QUICK_SECONDS = 0.2
"""CPU seconds of a test function, with all its cases, up to which `make quick` runs it."""

WORKER = "PYTEST_XDIST_WORKER"
"""Environment variable of processes in which xdist runs tests."""

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class CpuSeconds:
    """The plugin: measures in the processes that run tests, adds up in the one that started them. At the end of a run
    it writes the record, or fails a run whose new tests take too many, as the command line asks.

    Attributes:
        record: the seconds on record, by ids of test functions.
        seconds: those of the run.
    """

    def __init__(self, config: pytest.Config):
        self.config, self.record = config, read_record()
        self.seconds: Counter[str] = Counter()
        self._problems: list[str] = []
        self._before = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        now = seconds_of_tree(os.getpid())
        self.seconds[item.nodeid.partition("[")[0].removeprefix("tests/")] += now - self._before
        self._before = now
        return result

    def pytest_collection_finish(self) -> None:
        self._before = seconds_of_tree(os.getpid())

    @pytest.hookimpl(trylast=True)  # after those of xdist, which collects what the other processes have measured
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        machine = self.config.getoption("--record-durations")
        if WORKER in os.environ:
            self.config.workeroutput["cpu_seconds"] = dict(self.seconds)  # type: ignore[attr-defined]
        elif machine:
            write_record({**self.record, **self.seconds}, machine)
        elif self.config.getoption("--check-durations"):
            self._problems = unrecorded(self.seconds, self.record)
            if self._problems:
                session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self._problems:
            terminalreporter.write_line(line)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if not error:  # a process that has crashed tells nothing, and xdist starts another one
            self.seconds.update(node.workeroutput["cpu_seconds"])


def seconds_of_tree(pid: int) -> float:
    """CPU seconds of a process, of those that it has started, and of those of them that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [child for task in os.scandir(f"/proc/{pid}/task") for child in _children(task.path)]
    except OSError:  # it has ended, or this is no Linux
        return 0.0
    return sum(map(int, fields[11:15])) / CLOCK_TICKS + sum(map(seconds_of_tree, children))


def _children(task: str) -> list[int]:
    try:
        return [int(child) for child in Path(task, "children").read_text().split()]
    except OSError:  # the thread has ended
        return []


def read_record() -> dict[str, float]:
    """CPU seconds on record, by ids of test functions."""
    by_file = json.loads(RECORD.read_text())["seconds"]
    return {f"{file}::{test}": seconds for file, tests in by_file.items() for test, seconds in tests.items()}


def write_record(seconds: dict[str, float], machine: str) -> None:
    """Writes the record, with a line for each file.

    Args:
        seconds: by ids of test functions.
        machine: on which they were measured, and when.
    """
    by_file: dict[str, dict[str, float]] = {}
    for name, spent in sorted(seconds.items()):
        file, _, test = name.partition("::")
        place = RECORD.parent / file
        if place.is_file() and f"def {test}(" in place.read_text():  # others are gone
            by_file.setdefault(file, {})[test] = round(spent, 1)
    lines = ",\n".join(f"    {json.dumps(file)}: {json.dumps(tests)}" for file, tests in by_file.items())
    total = round(sum(spent for tests in by_file.values() for spent in tests.values()))
    RECORD.write_text(
        f'{{\n  "measured": {json.dumps(machine)},\n  "total": {total},\n  "seconds": {{\n{lines}\n  }}\n}}\n'
    )


def unrecorded(seconds: dict[str, float], record: dict[str, float]) -> list[str]:
    """What is wrong with a run's CPU seconds, in lines; none if tests without a record take few.

    Args:
        seconds: of the run, by ids of test functions.
        record: those on record.
    """
    new = {name: spent for name, spent in seconds.items() if name not in record}
    if sum(new.values()) <= MAX_UNRECORDED:
        return []
    return [
        f"tests without a record take {sum(new.values()):.1f} CPU seconds, and at most {MAX_UNRECORDED:.0f} are "
        "allowed: shorten them, move some to tests/longer.toml, or record them with pytest --record-durations MACHINE",
        *(f"{spent:8.1f} s {name}" for name, spent in sorted(new.items(), key=lambda pair: -pair[1])[:20]),
    ]
