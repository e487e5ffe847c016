"""Fixtures shared by all tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)` is a pool of n live ranks, the same for all tests."""
    pools: dict[int, RankPool] = {}

    def pool_of(num_ranks: int) -> RankPool:
        return pools.setdefault(num_ranks, RankPool(num_ranks))

    yield pool_of
    for pool in pools.values():
        pool.stop()
