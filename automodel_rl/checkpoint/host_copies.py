"""Copies of this rank's tensors on the host, in memory that every checkpoint uses again."""

import math
import weakref

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes to which every copy is aligned."""


class HostCopies:
    """One stretch of host memory for the copies of always the same tensors; pinned where they come from a GPU."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies all tensors; they may change when this returns.

        Args:
            tensors: on any device, by name.

        Returns:
            Copies on the host by name, which hold until the next call.
        """
        starts, end = {}, 0
        for name, tensor in tensors.items():
            starts[name] = end
            end += math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if self._memory is None or self._memory.numel() < end:
            self._memory = _allocate(end, pinned=bool(devices))
        copies = {}
        for name, tensor in tensors.items():
            stretch = self._memory[starts[name] : starts[name] + tensor.nbytes]
            copies[name] = stretch.view(tensor.dtype).view(tensor.shape)
            copies[name].copy_(tensor.detach(), non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies


def _allocate(num_bytes: int, pinned: bool) -> Tensor:
    """Bytes on the host. Registered as they are, for torch's own pinned memory is rounded up to a power of two."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if pinned and num_bytes:
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0)) == 0:  # else copies are slower, and right
            finalizer = weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
            finalizer.atexit = False  # the driver may be gone by then
    return memory
