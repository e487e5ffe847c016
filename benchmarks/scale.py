"""What one rank of a large job makes and sends: groups, collectives of a step by the size of their group, and memory.

    python -m benchmarks.scale 64 1024 16384

One real rank runs a tiny model in a job of so many ranks, of which the others are made up: torch's fake process group
takes what is sent and gives back what the rank has itself. So numbers of groups and of collectives are those of a real
job, and seconds are those of this rank's own work, without waiting. The rank is rank 0, with the first stage.
"""

import collections
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_rl import Engine, ModelHandle, OptimizerConfig, sft_loss
from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.parallel import host_collectives
from automodel_rl.step import agreement
from tests.tiny import make_sequences, save_tiny_model

LAYOUTS = {
    64: {"pp": 2, "tp": 4, "dp_shard": 8},
    1024: {"pp": 8, "tp": 8, "dp_shard": 16},
    16384: {"pp": 16, "tp": 8, "dp_shard": 16, "dp_replicate": 8},
}
"""Layouts by number of ranks, as models of 70B to 700B take them."""


class Collectives(TorchDispatchMode):
    """Counts collectives by the size of their group and their kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = collections.Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            group = next(dist.ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
            self.counts[f"{group.size()} {func.overloadpacket.__name__.strip('_')}"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def made_up_job(rank: int, size: int) -> Iterator[tuple[list[int], Collectives]]:
    """A job of which only one rank is real. Gives the sizes of the groups that hold it, as they are made, and what
    counts its collectives."""
    own, collectives, real = [size], Collectives(), dist.new_group
    real_rows, real_recv = agreement.gather_rows, dist.recv

    def gather_pieces(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        collectives.counts[f"{group.size()} gather of objects"] += 1
        return [own] * group.size()

    def new_group(ranks: list[int] | None = None, *given: Any, **how: Any) -> Any:
        if ranks is None or rank in ranks:
            own.append(size if ranks is None else len(ranks))
        return real(ranks, *given, **{**how, "backend": "fake"})

    def gather_rows(value: Tensor, group: dist.ProcessGroup) -> Tensor:
        real_rows(value, group)
        return value.expand(group.size(), -1)

    def recv(tensor: Tensor, *given: Any, **how: Any) -> None:
        real_recv(tensor, *given, **how)
        tensor.zero_()

    def alike(name: str, work: Callable[..., None]) -> Callable[..., None]:
        def call(given: Any, value: Any = None, src: Any = None, group: Any = None, **how: Any) -> None:
            collectives.counts[f"{dist.get_world_size(group)} {name}"] += 1
            work(given, value)

        return call

    places = {
        (dist, "new_group"): new_group,
        (torch.distributed.device_mesh, "new_group"): new_group,
        (agreement, "gather_rows"): gather_rows,
        (dist, "recv"): recv,
        (host_collectives, "gather_pieces"): gather_pieces,
        (dist, "broadcast_object_list"): alike("broadcast of objects", _broadcast_totals),
    }
    before = {place: getattr(*place) for place in places}
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        for place, function in places.items():
            setattr(*place, function)
        yield own, collectives
    finally:
        for place, function in before.items():
            setattr(*place, function)
        dist.destroy_process_group()


def _broadcast_totals(box: list[Any], _: Any) -> None:
    """What the last stage would send of a step: no totals."""
    box[0] = ({}, {}, {}) if box[0] is None else box[0]


def measure(size: int, layout: dict[str, int]) -> dict[str, Any]:
    """What one rank of a layout makes and sends."""
    parallel, before = ParallelConfig.model_validate(layout), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, **heads}
    with tempfile.TemporaryDirectory() as name:
        save_tiny_model(Path(name), "qwen3", tied=False, num_layers=16, **sizes)
        with made_up_job(0, size) as (groups, collectives):
            began = time.perf_counter()
            handle = ModelHandle.from_pretrained(ModelConfig(path=name, dtype="float32"), parallel)
            engine = Engine(handle, OptimizerConfig(decay="constant"))
            started = time.perf_counter() - began
            microbatches = [pack_microbatch(make_sequences(2, seed)) for seed in range(2 * parallel.pp)]
            engine.train_step(microbatches, sft_loss)  # the first one also agrees on sizes
            collectives.counts.clear()
            began = time.perf_counter()
            with collectives:
                engine.train_step(microbatches, sft_loss)
            step = time.perf_counter() - began
    return {
        "ranks": size,
        **layout,
        "groups": len(groups),
        "largest_groups": sorted(groups)[-4:],
        "start_s": round(started, 2),
        "step_s": round(step, 2),
        "memory_more_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024,
        "collectives_of_a_step": dict(sorted(collectives.counts.items(), key=lambda pair: int(pair[0].split()[0]))),
    }


def main() -> None:
    for size in map(int, sys.argv[1:] or ["64"]):
        sys.stdout.flush()
        child = os.fork()
        if not child:  # each job has a process of its own
            code = 1
            try:
                print(json.dumps(measure(size, LAYOUTS[size])), flush=True)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"the rank of {size} failed")


if __name__ == "__main__":
    main()
