"""Process groups: timeouts, release, and groups across several jobs.

Checked with torch 2.11, 2.13 and 2.15.
"""

import contextlib
import datetime
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from automodel_rl.compat.versions import TORCH


def set_timeouts(groups: Iterable[dist.ProcessGroup], longest: datetime.timedelta) -> None:
    """Sets the groups' timeout in place of their backend's default."""
    for group in groups:
        if TORCH < (2, 15):
            dist.distributed_c10d._set_pg_timeout(longest, group)
        else:
            dist.set_timeout(longest, group)  # type: ignore[attr-defined]


def clear_mesh_caches() -> None:
    """Clears torch's sharding caches: their keys keep meshes alive, and with them the threads and connections of
    destroyed groups."""
    debug._clear_sharding_prop_cache()
    for method in (*vars(ShardingPropagator).values(), *vars(_redistribute).values()):
        if isinstance(method, functools._lru_cache_wrapper):
            method.cache_clear()


def cross_job_group(store: dist.Store, rank: int, size: int, device: torch.device, seconds: float) -> Any:
    """Returns a process group of processes in different jobs: gloo on the CPU, NCCL on CUDA.

    In torch.distributed a process belongs to one world, and `new_group` can only make groups within it. So the
    backend is constructed directly, on a store of its own.

    Args:
        store: a store shared by all members.
        device: device of the tensors; on CUDA it must be this thread's current device.
        seconds: longest wait for a peer that the caller allows. NCCL's own timeout is longer, because it ends the
            whole process.
    """
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=seconds))
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = datetime.timedelta(seconds=2 * seconds + 60)
    with _watchdog_that_only_watches():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _watchdog_that_only_watches() -> Iterator[None]:
    """Groups made in this block have a watchdog that does not end the process when a peer is lost: a job must survive
    its generators."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
