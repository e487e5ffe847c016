"""Fixtures shared by all tests."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.faults import PLANTED, planted
from tests.rank_pool import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(n).run(function, *args)` runs on n live ranks, the same for all tests."""
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def fault() -> Iterator[None]:
    """The test runs with the known bug that `python -m tests.faults` asks for; else as it is."""
    with planted(os.environ.get(PLANTED)):
        yield
