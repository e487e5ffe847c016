"""A process group of one sender and its receivers, which are not ranks of its job. Gloo on the CPU, NCCL on CUDA."""

import datetime
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.compat.process_groups import group_outside_of_jobs
from automodel_rl.errors import WeightSyncError, innermost
from automodel_rl.weight_sync.slots import in_time, wait_until


@dataclass(frozen=True)
class Address:
    """The address at which receivers find the store of a weight sync.

    Attributes:
        host, port: the store on the job's first rank.
        generation: how often links were made. Names in the store depend on it, so that old ones are never used again.
    """

    host: str
    port: int
    generation: int

    def store(self, seconds: float) -> dist.Store:
        """A connection to the store, whose operations wait for at most so many seconds."""
        timeout = datetime.timedelta(seconds=seconds)
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(f"automodel_rl/sync/{self.generation}", store)


class Link:
    """Broadcasts from rank 0 to the others.

    Args:
        store: a store that all members share.
        name: the link's name in the store.
        rank: this process's rank in the link; 0 sends.
        size: number of members.
        device: the device of the tensors.
        seconds: longest wait for a peer.

    Raises:
        WeightSyncError: a member did not join.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, device: torch.device, seconds: float):
        self.device, self.seconds = device, seconds
        try:
            self._group = in_time(
                lambda: self._join(dist.PrefixStore(name, store), rank, size),
                "joining the other processes of a sync",
                seconds,
                lambda: raise_failure(store),
            )
        except RuntimeError as error:
            raise WeightSyncError(f"a process did not join the sync: {innermost(error)}") from None

    def _join(self, store: dist.Store, rank: int, size: int) -> Any:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # CUDA's current device belongs to a thread
        group = group_outside_of_jobs(store, rank, size, self.device, self.seconds)
        group.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), 0).wait()  # makes NCCL connect now
        return group

    def start(self, elements: Tensor) -> Callable[[], bool]:
        """Begins a broadcast, after the work queued on the current stream. On CUDA, the stream then waits for it.

        Args:
            elements: the tensor that rank 0 sends and the others receive into.

        Returns:
            A function that says whether the broadcast is done, or raises if it failed. On CUDA it always says yes,
            because the stream waits.
        """
        work = self._group.broadcast(elements, 0)
        if self.device.type == "cuda":
            work.wait()
            return lambda: True

        def is_done() -> bool:
            if not work.is_completed():
                return False
            try:
                work.wait()
            except RuntimeError as error:
                raise WeightSyncError(f"the other side is gone: {innermost(error)}") from None
            return True

        return is_done

    def wait(self, done: Callable[[], bool], watch: Callable[[], None]) -> None:
        """Waits on the host until a broadcast is done."""
        wait_until(done, "a bucket of weights", self.seconds, watch)

    def close(self, *, broken: bool) -> None:
        """Leaves the group.

        Args:
            broken: the group may have work that never ends, so do not wait for it.
        """
        box = [self._group]
        self._group = None
        if broken and self.device.type == "cuda":
            box[0].abort()
        elif broken:  # dropping gloo's last reference waits for the work under way
            threading.Thread(target=box.clear, daemon=True, name="weight-sync-link").start()


FAILED = "failed"


def report_failure(store: dist.Store, why: str) -> None:
    """Leaves the reason of a failure for the members of all links of this generation."""
    store.set(FAILED, why)


def raise_failure(store: dist.Store) -> None:
    """Raises WeightSyncError if a member has failed, or the store is gone with its rank."""
    try:
        failed = store.check([FAILED]) and store.get(FAILED).decode()
    except RuntimeError as error:
        raise WeightSyncError(f"the job's first rank is gone: {innermost(error)}") from None
    if failed:
        raise WeightSyncError(f"the sync failed elsewhere: {failed}")
