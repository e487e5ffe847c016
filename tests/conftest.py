"""Fixtures shared by all tests."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.rank_pool import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)` is a pool of n live ranks, the same for all tests."""
    pools: dict[int, RankPool] = {}

    def pool_of(num_ranks: int) -> RankPool:
        return pools.setdefault(num_ranks, RankPool(num_ranks))

    yield pool_of
    for pool in pools.values():
        pool.stop()
