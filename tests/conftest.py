"""Fixtures shared by all tests."""

import gc
import importlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu_seconds import QUICK_SECONDS, WORKER, CpuSeconds
from tests.faults import PLANTED, planted
from tests.longer import WHOLE_FILES, is_longer
from tests.rank_pool import RankPool
from tests.vllm_environment import why_missing
from tests.warm import start_children_warm
from tests.xdist_workers import start_workers_warm

SECONDS = pytest.StashKey[CpuSeconds]()

UNIT = Path(__file__).parent / "unit"
REAL_VLLM = "test_real_vllm.py::"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", metavar="MACHINE", help="write tests/durations.json, measured on a machine")
    parser.addoption("--check-durations", action="store_true", help="fail if tests without a record take long")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SECONDS] = CpuSeconds(config)
    config.pluginmanager.register(config.stash[SECONDS])
    if config.getoption("tx", None) and WORKER not in os.environ:
        start_workers_warm()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files without a test of each commit, whose imports take seconds."""
    name = str(collection_path.relative_to(UNIT.parent)) if UNIT.parent in collection_path.parents else ""
    return True if config.option.markexpr in ("not longer", "quick") and name in WHOLE_FILES else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    record = config.stash[SECONDS].record
    longest = Counter[str]()  # of the tests of each file
    for name, seconds in record.items():
        file = name.partition("::")[0]
        longest[file] = max(longest[file], seconds)
    # What takes longest comes first, so that no process is left with it while the others have nothing to do.
    items.sort(key=lambda item: -longest[item.nodeid.removeprefix("tests/").partition("::")[0]])
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if is_longer(name):
            item.add_marker("longer")
        elif UNIT in item.path.parents and record.get(name.partition("[")[0], 0.0) <= QUICK_SECONDS:
            item.add_marker("quick")
    of_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpus and not importlib.import_module("torch").cuda.is_available():
        for item in of_gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()  # collections need not look at all that was imported and collected


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many tests ran a real vLLM, or why none did."""
    of_vllm = {
        outcome: sum(REAL_VLLM in report.nodeid.partition("[")[0] for report in terminalreporter.stats.get(outcome, ()))
        for outcome in ("passed", "failed", "skipped")
    }
    if any(of_vllm.values()):
        why = f" ({why_missing()})" if of_vllm["skipped"] else ""
        found = ", ".join(f"{count} {outcome}" for outcome, count in of_vllm.items() if count)
        terminalreporter.write_line(f"tests with a real vLLM: {found}{why}")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(n).run(function, *args)` runs on n live ranks, the same for all tests."""
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session", autouse=True)
def warm_children() -> None:
    """Processes that tests start in their own process, not on ranks, are forks, too."""
    start_children_warm()


@pytest.fixture(autouse=True)
def fault() -> Iterator[None]:
    """The test runs with the known bug that `python -m tests.faults` asks for; else as it is."""
    with planted(os.environ.get(PLANTED)):
        yield
