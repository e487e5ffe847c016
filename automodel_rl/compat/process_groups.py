"""Process groups: limits of their waits, and groups of processes that are no ranks of one job.

Checked with torch 2.11.0 and 2.13.0.
"""

import contextlib
import datetime
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout


def limit_waits(groups: Iterable[dist.ProcessGroup], longest: datetime.timedelta) -> None:
    """Gives groups the longest wait in place of their backend's, which is another one."""
    for group in groups:
        _set_pg_timeout(longest, group)


def group_outside_of_jobs(store: dist.Store, rank: int, size: int, device: torch.device, seconds: float) -> Any:
    """A backend's process group of processes that belong to different jobs: gloo on the CPU, NCCL on CUDA.

    torch.distributed knows one world to a process, and its `new_group` only groups within it. So the backends are built
    directly, on a store of their own.

    Args:
        store: shared by all members.
        rank: of this process in the group.
        size: number of members.
        device: where the tensors are; this thread's current one on CUDA.
        seconds: longest wait for a peer that the caller allows. NCCL's own limit ends the whole process, so it is
            longer.
    """
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=seconds))
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = datetime.timedelta(seconds=2 * seconds + 60)
    with _watchdog_that_only_watches():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _watchdog_that_only_watches() -> Iterator[None]:
    """A group's watchdog ends the process when a peer is gone, unless this says otherwise when the group is made. A job
    does not end with one of its generators."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
