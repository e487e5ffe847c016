"""Fixtures shared by all tests."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.table import PLANTED, planted
from tests.rank_pool import RankPool
from tests.warm import start_children_warm

UNIT = Path(__file__).parent / "unit"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if UNIT in item.path.parents:
            item.add_marker("quick")
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()  # collections need not look at all that was imported and collected


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
