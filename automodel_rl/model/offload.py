"""Offloading: moves tensors to host memory to free their device memory."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from automodel_rl.parallel.sharding import local_tensor

ALIGNMENT = 64
"""Alignment in bytes of storages in host memory."""


class Offload:
    """Moves the storages of tensors to the host and back, in place: aliases stay valid.

    A storage on the host has size 0, so its tensors must not be used. Host memory is allocated once and reused:
    pinning takes seconds.

    Args:
        tensors: called at every move to the host; returns the tensors, whole or sharded. Only local shards move.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]):
        self.is_on_host = False
        self._tensors = tensors
        self._host = torch.empty(0, dtype=torch.uint8)
        self._waiting: list[tuple[torch.UntypedStorage, Tensor]] = []

    @torch.no_grad()
    def to_host(self) -> int:
        """Moves the tensors to the host, after all work queued on the device. Does nothing if they are there.

        Returns:
            Bytes of device memory freed for this process; `torch.cuda.empty_cache` frees them for others.
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

        If memory runs out it raises, brings back none, and can be called again.
        """
        with self.to_device_after(()):
            pass

    @contextlib.contextmanager
    @torch.no_grad()
    def to_device_after(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Brings everything back. The given tensors, or views of offloaded ones, get their values only after the
        block, which may use their memory for other values."""
        waiting = self._waiting
        try:
            for storage, host in waiting:
                storage.resize_(host.numel())
            later = _sizes_by_storage(tensors)
            # A storage with more bytes than these tensors also holds other values.
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
    """Allocates host memory, uint8 [num_bytes], pinned if a device is a GPU.

    CUDA pins it, because torch rounds pinned allocations up to a power of two. If that fails, copies are slower but
    correct.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes and any(device.type == "cuda" for device in devices):
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0)) == 0:
            finalizer = weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
            finalizer.atexit = False  # the driver may be gone by then
        else:
            with contextlib.suppress(RuntimeError):  # the driver reports this error again at the next kernel
                torch.zeros(1, device="cuda")
    return memory


def aligned(num_bytes: int) -> int:
    """Rounds a size up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _sizes_by_storage(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns the bytes of the tensors in each storage, by its address."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        sizes[address] = sizes.get(address, 0) + tensor.nbytes
    return sizes


def _fill(storages: Iterable[tuple[torch.UntypedStorage, Tensor]]) -> None:
    for storage, host in storages:
        _as_bytes(storage).copy_(host, non_blocking=True)


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
