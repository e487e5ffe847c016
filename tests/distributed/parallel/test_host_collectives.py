"""Numbers that go up and down a tree of ranks are those of all of them, on every rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from automodel_rl.config import ParallelConfig
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.parallel.host_collectives import (
    any_rank,
    combine,
    gather_objects,
    gather_rows,
    gather_to_first,
    scatter_from_first,
)
from automodel_rl.parallel.layout import build_layout
from tests.rank_pool import RankPool


def combined(size: int) -> tuple[list[float], list[int], list[list[int]], list[Any], list[bool], list[int]]:
    """Sums, maxima, rows, objects and votes of the ranks, and whom this rank sent numbers to."""
    layout = build_layout(ParallelConfig(dp_shard=size), join_process_group(size))
    group, rank, sent = layout.world_control, dist.get_rank(), []
    send = dist.send

    def noted(*given: object, group_dst: int, **how: object) -> None:
        sent.append(group_dst)
        send(*given, group_dst=group_dst, **how)

    dist.send = noted
    try:
        sums = torch.tensor([1.0 * rank, 0.5], dtype=torch.float64)
        combine(sums, group)
        largest = torch.tensor([rank, -rank, 7])
        combine(largest, group, torch.maximum)
        rows = gather_rows(torch.tensor([rank, rank * rank]), group)
        objects = gather_objects({"rank": "x" * 1000 * rank} if rank % 3 else None, group)
        votes = any_rank([rank == size - 1, False], layout)
    finally:
        dist.send = send
    return sums.tolist(), largest.tolist(), rows.tolist(), objects, votes, sent


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_rank_gets_what_all_have(ranks: RankPool, size: int) -> None:
    for rank, (sums, largest, rows, objects, votes, sent) in enumerate(ranks(size).run(combined, size)):
        assert sums == [size * (size - 1) / 2, 0.5 * size]
        assert largest == [size - 1, 0, 7]
        assert rows == [[other, other * other] for other in range(size)]
        assert objects == [{"rank": "x" * 1000 * other} if other % 3 else None for other in range(size)]
        assert votes == [True, False]
        assert {*sent} == ({rank & (rank - 1)} if rank else set())


def to_first_and_back(size: int) -> tuple[list[Any] | None, Any, int]:
    """What rank 0 gets of all, what this rank gets of it, and how many ranks it talked to."""
    layout = build_layout(ParallelConfig(dp_shard=size), join_process_group(size))
    group, rank, peers = layout.world_control, dist.get_rank(), set[int]()
    send, recv = dist.send, dist.recv

    def sent(*given: object, group_dst: int, **how: object) -> None:
        peers.add(group_dst)
        send(*given, group_dst=group_dst, **how)

    def received(*given: object, group_src: int, **how: object) -> None:
        peers.add(group_src)
        recv(*given, group_src=group_src, **how)

    dist.send, dist.recv = sent, received
    try:
        gathered = gather_to_first("x" * 100 * rank, group)
        scattered = scatter_from_first(None if rank else [{"of": other} for other in range(size)], group)
    finally:
        dist.send, dist.recv = send, recv
    return gathered, scattered, len(peers)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_rank_0_gets_what_all_have_and_gives_each_its_own(ranks: RankPool, size: int) -> None:
    for rank, (gathered, scattered, num_peers) in enumerate(ranks(size).run(to_first_and_back, size)):
        assert gathered == (None if rank else ["x" * 100 * other for other in range(size)])
        assert scattered == {"of": rank}
        assert num_peers <= 3
