"""Copies of this rank's tensors on the host, in memory that every checkpoint uses again, taken beside computation."""

import contextlib
import math
import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes to which every copy is aligned."""


class HostCopies:
    """One stretch of host memory for the copies of always the same tensors; pinned where they come from a GPU.

    Args:
        sizes: bytes of every tensor that will be copied; memory for them is got ready in a thread, for pinning much of
            it takes seconds.
        device: where they are.
    """

    def __init__(self, sizes: Iterable[int], device: torch.device):
        self._streams = {device: torch.cuda.Stream(device)} if device.type == "cuda" else {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._events: list[torch.cuda.Event] = []
        self._getting_ready = threading.Thread(target=self._get_ready, args=(sum(map(_aligned, sizes)),))
        self._getting_ready.start()

    def _get_ready(self, num_bytes: int) -> None:
        with contextlib.suppress(RuntimeError):  # of too little memory; `begin` tries again, and says so
            self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        """Registered as it is, for torch's own pinned memory is rounded up to a power of two."""
        self._memory = torch.empty(0, dtype=torch.uint8)  # lets go of what there was
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        for device in self._streams:
            torch.cuda.set_device(device)  # of this thread; else that of another rank
        if self._streams and num_bytes:
            runtime = torch.cuda.cudart()
            if int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0)) == 0:  # else copies are slower, and right
                finalizer = weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
                finalizer.atexit = False  # the driver may be gone by then
        self._memory = memory

    @torch.no_grad()
    def begin(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Begins to copy all tensors, when what is queued on their devices now has been computed.

        Args:
            tensors: on any device, by name; not to be changed before `hold` or `wait`, nor let go of.

        Returns:
            Copies on the host by name, complete after `wait`, which hold until the next call.
        """
        self._getting_ready.join()
        needed = sum(_aligned(tensor.nbytes) for tensor in tensors.values())
        if self._memory.numel() < needed:
            self._allocate(needed)
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        copies, start = {}, 0
        for name, tensor in tensors.items():
            stretch = self._memory[start : start + tensor.nbytes]
            start += _aligned(tensor.nbytes)
            copies[name] = stretch.view(tensor.dtype).view(tensor.shape)
            beside = self._streams.get(tensor.device)
            with contextlib.nullcontext() if beside is None else torch.cuda.stream(beside):
                copies[name].copy_(tensor, non_blocking=True)
        self._events = [stream.record_event() for stream in self._streams.values()]
        return copies

    def hold(self) -> None:
        """What is queued on the devices from here on is computed when everything is copied."""
        for event, device in zip(self._events, self._streams, strict=False):
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Returns when everything is copied."""
        for event in self._events:
            event.synchronize()


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT
