"""A process group of one sender and its receivers, which are no ranks of the sender's job: gloo, or NCCL on CUDA."""

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
    """Where receivers find the store of a sync.

    Attributes:
        host, port: of the job's first rank.
        generation: how often links were made; old ones are never used again.
    """

    host: str
    port: int
    generation: int

    def store(self, seconds: float) -> dist.Store:
        """A connection to the store, which waits for so long at most."""
        timeout = datetime.timedelta(seconds=seconds)
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(f"automodel_rl/sync/{self.generation}", store)


class Link:
    """Broadcasts from rank 0 to the others.

    Args:
        store: shared by all members.
        name: of the link in the store.
        rank: of this process; 0 sends.
        size: number of members.
        device: where the tensors are.
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
            torch.cuda.set_device(self.device)  # of this thread
        group = group_outside_of_jobs(store, rank, size, self.device, self.seconds)
        group.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), 0).wait()  # NCCL connects now
        return group

    def start(self, elements: Tensor) -> Callable[[], bool]:
        """Begins a broadcast, after what is queued on the current stream, which goes on after it.

        Args:
            elements: sent, or written to.

        Returns:
            On the CPU whether it is done, else always true: the stream waits. Raises if it has failed.
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
        """Waits for a broadcast on the host."""
        wait_until(done, "a bucket of weights", self.seconds, watch)

    def close(self, *, broken: bool) -> None:
        """Lets go of it; a broken one may have work that never ends."""
        box = [self._group]
        self._group = None
        if broken and self.device.type == "cuda":
            box[0].abort()
        elif broken:  # gloo's last reference waits for what is under way
            threading.Thread(target=box.clear, daemon=True, name="weight-sync-link").start()


FAILED = "failed"


def tell_failure(store: dist.Store, why: str) -> None:
    """Leaves word for the members of all links of this generation."""
    store.set(FAILED, why)


def raise_failure(store: dist.Store) -> None:
    """Raises WeightSyncError if a member has failed, or the store is gone with its rank."""
    try:
        failed = store.check([FAILED]) and store.get(FAILED).decode()
    except RuntimeError as error:
        raise WeightSyncError(f"the job's first rank is gone: {innermost(error)}") from None
    if failed:
        raise WeightSyncError(f"the sync failed elsewhere: {failed}")
