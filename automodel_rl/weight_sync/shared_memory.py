"""Buffers shared by two processes: CUDA IPC handles on the same device, a file in shared memory on the CPU.

Uses `torch.multiprocessing.reductions`, with which torch itself sends CUDA tensors to other processes. Tested with
torch 2.11 and 2.13.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from automodel_rl.errors import WeightSyncError

DEVICE_ARGUMENT = 6
"""Index of the device among the arguments of rebuild_cuda_tensor. Processes may number devices differently."""


@dataclass(frozen=True)
class SharedBuffer:
    """Description from which another process opens a buffer: a file in shared memory on the CPU, on CUDA the arguments
    of torch's rebuild_cuda_tensor, and the handle of the event that the owner records after filling the buffer."""

    num_bytes: int
    file: str | None
    cuda: tuple[Any, ...]
    filled: bytes

    def open(self, device: torch.device) -> Tensor:
        if self.file is not None:
            return torch.from_file(self.file, shared=True, size=self.num_bytes, dtype=torch.uint8)
        arguments = list(self.cuda)
        arguments[DEVICE_ARGUMENT] = device.index or 0
        return rebuild_cuda_tensor(*arguments)


def share(num_bytes: int, device: torch.device, filled: torch.cuda.Event | None) -> tuple[Tensor, SharedBuffer]:
    """Returns a new buffer (uint8) and its description. On the CPU, call `unlink` once the other process has opened
    it."""
    if device.type == "cpu":
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, file = tempfile.mkstemp(prefix="automodel_rl_", dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            Path(file).unlink()
            raise WeightSyncError(
                f"no room for a buffer of {num_bytes / 2**20:.0f} MiB in shared memory ({error.strerror}): lower "
                "weight_sync.buffer_mib or num_buffers"
            ) from None
        finally:
            os.close(descriptor)
        return torch.from_file(file, shared=True, size=num_bytes, dtype=torch.uint8), SharedBuffer(
            num_bytes, file, (), b""
        )
    assert filled is not None
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    _, arguments = reduce_tensor(buffer)
    return buffer, SharedBuffer(num_bytes, None, arguments, filled.ipc_handle())


def interprocess_event(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.Event(interprocess=True) if device.type == "cuda" else None


def unlink(shared: SharedBuffer) -> None:
    """Removes a buffer's file. Open buffers keep their memory."""
    if shared.file is not None:
        Path(shared.file).unlink(missing_ok=True)
