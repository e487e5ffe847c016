"""Offloading: tensors wait on the host while their device memory is used for something else."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from automodel_rl.parallel.sharding import local_tensor

ALIGNMENT = 64
"""The copy of every storage starts at a multiple of this many bytes."""


class Offload:
    """Moves the storages of tensors to the host and back, in place: every alias of a tensor keeps its identity.

    A storage on the host has size 0, so its tensors must not be used. The host memory is allocated once and used again,
    for pinning takes seconds.

    Args:
        tensors: gives the tensors, whole or sharded, at every move to the host; only this rank's shards move.

    Attributes:
        is_on_host: whether the tensors are on the host.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]):
        self.is_on_host = False
        self._tensors = tensors
        self._host = torch.empty(0, dtype=torch.uint8)
        self._waiting: list[tuple[torch.UntypedStorage, Tensor]] = []

    @torch.no_grad()
    def to_host(self) -> int:
        """Moves the tensors to the host, after all work that is queued on the device. Does nothing if they are there.

        Returns:
            Bytes of the device's memory that are free now, for this process; `torch.cuda.empty_cache` frees them for
            others.
        """
        if self.is_on_host:
            return 0
        every = (local_tensor(tensor.detach()).untyped_storage() for tensor in self._tensors())
        storages = {storage.data_ptr(): storage for storage in every if storage.nbytes()}  # tensors may share one
        sizes = [aligned(storage.nbytes()) for storage in storages.values()]
        devices = {storage.device for storage in storages.values()}
        if self._host.numel() < sum(sizes):
            self._host = host_memory(sum(sizes), devices)
        stretches = self._host[: sum(sizes)].split(sizes)
        waiting = [(s, stretch[: s.nbytes()]) for s, stretch in zip(storages.values(), stretches, strict=True)]
        for storage, host in waiting:
            host.copy_(_as_bytes(storage), non_blocking=True)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        for storage, _ in waiting:
            storage.resize_(0)
        self._waiting, self.is_on_host = waiting, True
        return sum(sizes)

    @torch.no_grad()
    def to_device(self) -> None:
        """Brings the tensors back, bit for bit. Does nothing if they are there.

        If memory runs out it raises and brings back none, and can be called again.
        """
        with self.to_device_after(()):
            pass

    @contextlib.contextmanager
    @torch.no_grad()
    def to_device_after(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Brings everything back. These tensors get their own values only after the block, in which they may have
        others.

        Args:
            tensors: some of the tensors that are on the host, or views of them.
        """
        waiting = self._waiting
        try:
            for storage, host in waiting:
                storage.resize_(host.numel())
            later = _sizes_by_storage(tensors)
            # A storage with more bytes than these tensors has other values, too.
            _fill((storage, host) for storage, host in waiting if later.get(storage.data_ptr()) != storage.nbytes())
        except BaseException:
            for storage, _ in waiting:
                storage.resize_(0)
            raise
        self._waiting, self.is_on_host = [], False
        try:
            yield
        finally:
            _fill((storage, host) for storage, host in waiting if storage.data_ptr() in later)


def host_memory(num_bytes: int, devices: Iterable[torch.device]) -> Tensor:
    """Host memory, uint8 [num_bytes], pinned if a device is a GPU.

    It is pinned through CUDA, because torch's own pinned memory is rounded up to a power of two. If pinning fails,
    copies are slower, but still right.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes and any(device.type == "cuda" for device in devices):
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0)) == 0:
            finalizer = weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
            finalizer.atexit = False  # the driver may be gone by then
        else:
            with contextlib.suppress(RuntimeError):  # the driver reports this error once more, in the next kernel
                torch.zeros(1, device="cuda")
    return memory


def aligned(num_bytes: int) -> int:
    """The size, rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _sizes_by_storage(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the tensors in each storage, by its address."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        sizes[address] = sizes.get(address, 0) + tensor.nbytes
    return sizes


def _fill(storages: Iterable[tuple[torch.UntypedStorage, Tensor]]) -> None:
    """Copies bytes on the host into storages."""
    for storage, host in storages:
        _as_bytes(storage).copy_(host, non_blocking=True)


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
