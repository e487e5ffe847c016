"""The cost of leading many ranks: time of a call, connections and groups of a rank, and what a large batch takes.

    python benchmarks/control.py 4 16 64

Ranks are processes of this machine over gloo, forked from one that has imported everything. They have no model: a call
does nothing, so that times are those of control alone. On few processors ranks take turns, and a call's time is that of
all its messages one after the other; `messages` says how many lie one behind the other on the way, which is what counts
where every rank has a processor. The layout is dp_shard = ranks / 4, pp = 4.
"""

import json
import os
import resource
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from automodel_rl import Batch, ParallelConfig, Policy, TokenSequence
from automodel_rl.batch import Packing
from automodel_rl.checkpoint.storage import plan_writes
from automodel_rl.launch.local import free_port
from automodel_rl.launch.process_group import join_process_group, leave_process_group
from automodel_rl.losses import Readout, sft_loss
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import build_layout, own_group
from automodel_rl.policy.crew import POLICY, TreeCrew
from automodel_rl.policy.shares import Share

TOKENS, CALLS, BATCHES, LONGEST = 4_000_000, 30, 5, 8192

SHARDS = 100
"""Number of shards of each kind in the planned checkpoint."""


class Rank:
    """Does nothing but what a rank does with rows before it computes."""

    def ping(self) -> None:
        pass

    def evaluate(self, share: Share | None, *_: Any) -> None:
        if share is not None:
            share.pack()


new_group = dist.new_group


def num_sockets() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of the listing itself
            continue
    return sum("socket" in link for link in links)


def rows() -> Batch:
    generator, left, found = np.random.default_rng(0), TOKENS, []
    while left > 0:
        n = min(left, int(np.clip(generator.lognormal(np.log(700), 1.0), 64, LONGEST)))
        ids = torch.from_numpy(generator.integers(1, 30_000, n))
        found.append(TokenSequence(ids, torch.ones(n, dtype=torch.bool), {"advantages": torch.zeros(n)}))
        left -= n
    return Batch(found)


def seconds_of(work: Any, count: int) -> float:
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def rank_of(rank: int, size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="localhost")
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    made: list[Any] = []

    def note_group(*given: Any, **named: Any) -> Any:
        made.append(new_group(*given, **named))
        return made[-1]

    dist.new_group = note_group
    started = time.perf_counter()
    device = join_process_group(size)
    layout = build_layout(ParallelConfig(pp=4, dp_shard=size // 4), device)
    took = time.perf_counter() - started
    crew = TreeCrew(layout, {POLICY: Rank()})
    if rank == 0:
        lead(crew, size, took)
    ended = crew.follow() if rank else None
    sockets = num_sockets()
    planned = plan_checkpoint(rank, size)
    everyone = gather_objects((sockets, num_sockets()), layout.world_control)
    if rank == 0:
        others = [before for before, _ in everyone[1:]]
        print(
            json.dumps(
                {
                    "ranks": size,
                    "groups": sum(one is not dist.GroupMember.NON_GROUP_MEMBER for one in made),
                    "of_all": len(made),
                    "sockets_of_rank_0": everyone[0][0],
                    "of_others": max(others),
                    "plan_of_a_checkpoint_s": round(planned, 2),
                    "sockets_of_rank_0_after_it": everyone[0][1],
                    "of_others_after_it": max(after for _, after in everyone[1:]),
                }
            )
        )
    assert ended is None
    leave_process_group()


def plan_checkpoint(rank: int, size: int) -> float:
    """Seconds until a checkpoint is planned in which each rank has shards of its own, and shards that all have."""
    group = own_group([[*range(size)]], "gloo")
    assert group is not None
    names = [*(f"{rank}.{number}" for number in range(SHARDS)), *map(str, range(SHARDS))]
    started = time.perf_counter()
    plan_writes({"language": {"model": {name: torch.zeros(1) for name in names}}}, group)
    return time.perf_counter() - started


def lead(crew: TreeCrew, size: int, took: float) -> None:
    policy = Policy(crew, Packing(16_384, size // 4, 4), 32_768)
    empty = seconds_of(lambda: crew.ask(POLICY, "ping"), CALLS)
    batch = rows()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shared = seconds_of(lambda: policy.evaluate(batch, sft_loss, Readout()), BATCHES)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    depth = 2 * max(1, (size - 1).bit_length())
    print(
        json.dumps(
            {
                "ranks": size,
                "start_s": round(took, 2),
                "call_ms": round(1000 * empty, 2),
                "messages": depth,
                "batch_of_4M_tokens_s": round(shared, 3),
                "memory_more_mib": more // 1024,
            }
        ),
        flush=True,
    )
    crew.end()


def main() -> None:
    for size in map(int, sys.argv[1:] or ["4"]):
        port = free_port()
        sys.stdout.flush()
        children = []
        for rank in range(size):
            child = os.fork()
            if not child:
                try:
                    rank_of(rank, size, port)
                    code = 0
                except BaseException as error:  # a child must not go on as the parent
                    print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
                    code = 1
                sys.stdout.flush()
                os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{sum(map(bool, codes))} of {size} ranks failed")


if __name__ == "__main__":
    main()
