"""Copies of this rank's tensors on the host, made while the device computes, in reused memory."""

import contextlib
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from automodel_rl.model.offload import aligned, host_memory


class HostCopies:
    """One block of host memory for copies of the same tensors at every checkpoint, pinned for a GPU's.

    Args:
        sizes: bytes of every tensor to be copied. A thread allocates memory for all of them, because pinning takes
            seconds.
    """

    def __init__(self, sizes: Iterable[int], device: torch.device):
        self._streams = {device: torch.cuda.Stream(device)} if device.type == "cuda" else {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._events: list[torch.cuda.Event] = []
        self._getting_ready = threading.Thread(target=self._get_ready, args=(sum(aligned(size) for size in sizes),))
        self._getting_ready.start()

    def _get_ready(self, num_bytes: int) -> None:
        with contextlib.suppress(RuntimeError):  # out of memory: `begin` tries again, and raises
            self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)  # frees the memory used before
        for device in self._streams:
            torch.cuda.set_device(device)  # a new thread starts with device 0
        self._memory = host_memory(num_bytes, self._streams)

    @torch.no_grad()
    def begin(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Starts copying all tensors, after the work now queued on the devices.

        Args:
            tensors: tensors on any device, by name. The caller keeps them alive, and unchanged until it has called
                `hold` or `wait`.

        Returns:
            Host copies by name, complete after `wait`, and valid until the next `begin`.
        """
        self._getting_ready.join()
        needed = sum(aligned(tensor.nbytes) for tensor in tensors.values())
        if self._memory.numel() < needed:
            self._allocate(needed)
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        copies, start = {}, 0
        for name, tensor in tensors.items():
            stretch = self._memory[start : start + tensor.nbytes]
            start += aligned(tensor.nbytes)
            copies[name] = stretch.view(tensor.dtype).view(tensor.shape)
            beside = self._streams.get(tensor.device)
            with contextlib.nullcontext() if beside is None else torch.cuda.stream(beside):
                copies[name].copy_(tensor, non_blocking=True)
        self._events = [stream.record_event() for stream in self._streams.values()]
        return copies

    def hold(self) -> None:
        """Makes device work queued from now on wait for the copies."""
        for event, device in zip(self._events, self._streams, strict=False):
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Waits for the copies."""
        for event in self._events:
            event.synchronize()
