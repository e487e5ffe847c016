"""Process group of one sender and its receivers, which are not ranks of its job. Gloo on the CPU, NCCL on CUDA."""

import datetime
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.compat.process_groups import cross_job_group
from automodel_rl.errors import WeightSyncError, describe_root_cause
from automodel_rl.weight_sync.slots import in_time, wait_until


@dataclass(frozen=True)
class Address:
    """Address of the store where links meet, on the job's first rank.

    Attributes:
        generation: how often links have been created; part of the store's keys, which are therefore never reused.
    """

    host: str
    port: int
    generation: int

    def store(self, seconds: float) -> dist.Store:
        timeout = datetime.timedelta(seconds=seconds)
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(f"automodel_rl/sync/{self.generation}", store)


class Link:
    """Broadcasts from rank 0 to the others. Its construction is a collective of all members.

    Args:
        name: prefix of the link's keys in the store, which all members share.

    Raises:
        WeightSyncError: a member did not join within `seconds`.
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
            raise WeightSyncError(f"a process did not join the sync: {describe_root_cause(error)}") from None

    def _join(self, store: dist.Store, rank: int, size: int) -> Any:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the current device is set per thread
        group = cross_job_group(store, rank, size, self.device, self.seconds)
        group.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), 0).wait()  # makes NCCL connect now
        return group

    def start(self, elements: Tensor) -> Callable[[], bool]:
        """Starts a broadcast after the work queued on the current stream, which on CUDA then waits for it.

        Returns:
            A function that returns whether the broadcast is done, on CUDA always, or raises WeightSyncError.
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
                raise WeightSyncError(f"the peer has disconnected: {describe_root_cause(error)}") from None
            return True

        return is_done

    def wait(self, done: Callable[[], bool], watch: Callable[[], None]) -> None:
        wait_until(done, "a bucket of weights", self.seconds, watch)

    def close(self, *, broken: bool) -> None:
        """Leaves the group, without waiting for its work if it is `broken`."""
        box = [self._group]
        self._group = None
        if broken and self.device.type == "cuda":
            box[0].abort()
        elif broken:  # dropping gloo's last reference waits for pending work
            threading.Thread(target=box.clear, daemon=True, name="weight-sync-link").start()


FAILED = "failed"


def report_failure(store: dist.Store, why: str) -> None:
    """Reports a failure to all links of this generation."""
    store.set(FAILED, why)


def raise_failure(store: dist.Store) -> None:
    """Raises WeightSyncError if a member has reported a failure, or the first rank has exited."""
    try:
        failed = store.check([FAILED]) and store.get(FAILED).decode()
    except RuntimeError as error:
        raise WeightSyncError(f"the job's first rank has exited: {describe_root_cause(error)}") from None
    if failed:
        raise WeightSyncError(f"the sync failed in another process: {failed}")
