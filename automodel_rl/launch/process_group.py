"""Joins the job's process group: the existing one, one from torchrun's environment, or a group of one rank."""

import atexit
import contextlib
import datetime
import os
import resource

import torch
import torch.distributed as dist

from automodel_rl.errors import InputError
from automodel_rl.launch import watchdog
from automodel_rl.launch.attempt import agree_on_attempt, is_started_by_agent
from automodel_rl.launch.local import is_rank

LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
"""Environment variable that makes gloo connect two ranks when they first exchange a message. By default every rank
of a group connects to all others."""


def join_process_group(world_size: int) -> torch.device:
    """Joins the process group and returns this rank's device: the CUDA device of its local rank, otherwise the CPU.

    Raises:
        InputError: the job has another number of ranks than the layout needs, or this machine has too few GPUs.
    """
    if not dist.is_initialized():
        _initialise()
    if dist.get_world_size() != world_size:
        raise InputError(
            f"the job has {dist.get_world_size()} ranks but the layout needs {world_size} "
            "(parallel: pp x dp_shard x dp_replicate x tp x cp; or components): change the layout or the number of "
            "ranks"
        )
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _initialise() -> None:
    os.environ.setdefault(LAZY_GLOO, "1")
    _allow_many_files()
    leave_process_group()  # the watch is still on if the caller destroyed our group
    backend = "gloo"
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"this machine has {torch.cuda.device_count()} GPUs but at least {local_rank + 1} ranks were "
                "requested: use a layout with fewer ranks"
            )
        torch.cuda.set_device(local_rank)
        backend = "nccl"
    if is_rank():
        store, rank, world_size = _rendezvous()
        if is_started_by_agent():
            watchdog.attempt = agree_on_attempt(store, rank, world_size, longest_wait().total_seconds())
            # Without the prefix a new rank may read the address of a rank of an earlier attempt.
            store = dist.PrefixStore(watchdog.attempt, store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=longest_wait())
        if world_size > 1:
            watchdog.watch_peers(store)
    else:  # no launcher: a job of one rank, which must not appear in the environment
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(leave_process_group)


def _rendezvous() -> tuple[dist.Store, int, int]:
    """Returns the job's store, this rank and the number of ranks."""
    try:
        found: tuple[dist.Store, int, int] = next(dist.rendezvous("env://", timeout=longest_wait()))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise InputError(
            f"MASTER_PORT={os.environ.get('MASTER_PORT')}: another process listens on it: choose another port, such as "
            "torchrun --master-port 29501"
        ) from None
    return found


def _allow_many_files() -> None:
    """Raises the open-file limit to the maximum: rank 0 holds the job's store, with two connections from every rank."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems allow less than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def longest_wait() -> datetime.timedelta:
    """Returns the timeout of collectives: twice the watchdog's, because the watchdog reports which rank hangs."""
    if watchdog.hang_seconds is None:
        return datetime.timedelta(days=365)
    return datetime.timedelta(seconds=2 * watchdog.hang_seconds)


def leave_process_group() -> None:
    """Destroys the process group, if any, then ends the watch over the job, then releases the store."""
    if dist.is_initialized():
        dist.destroy_process_group()
    watchdog.leave()  # also if the caller already destroyed the group
