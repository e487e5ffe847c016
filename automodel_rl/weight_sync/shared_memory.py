"""Buffers that two processes share: by CUDA IPC handles on the same device, by a file in memory on the CPU.

Uses `torch.multiprocessing.reductions`, by which torch itself sends CUDA tensors to other processes. Checked with torch
2.11 and 2.13.
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
"""Place of the device's number among the arguments of rebuild_cuda_tensor. Processes may number devices differently."""


@dataclass(frozen=True)
class SharedBuffer:
    """A description with which another process opens a buffer.

    Attributes:
        num_bytes: the buffer's size.
        file: path of the file in memory; None on CUDA.
        cuda: arguments of torch's rebuild_cuda_tensor; empty on the CPU.
        filled: handle of the event that the owner records after filling the buffer; empty on the CPU.
    """

    num_bytes: int
    file: str | None
    cuda: tuple[Any, ...]
    filled: bytes

    def open(self, device: torch.device) -> Tensor:
        """Opens the buffer in this process, as uint8."""
        if self.file is not None:
            return torch.from_file(self.file, shared=True, size=self.num_bytes, dtype=torch.uint8)
        arguments = list(self.cuda)
        arguments[DEVICE_ARGUMENT] = device.index or 0
        return rebuild_cuda_tensor(*arguments)


def share(num_bytes: int, device: torch.device, filled: torch.cuda.Event | None) -> tuple[Tensor, SharedBuffer]:
    """A new buffer (uint8) and its description. On the CPU, call `unlink` once the other process has opened it.

    Args:
        num_bytes: the buffer's size.
        device: the buffer's device.
        filled: an interprocess event, on CUDA only.
    """
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
    """An event for `share`; None on the CPU."""
    return torch.cuda.Event(interprocess=True) if device.type == "cuda" else None


def unlink(shared: SharedBuffer) -> None:
    """Removes the file of a buffer, which both sides have opened or given up. Open buffers keep their memory."""
    if shared.file is not None:
        Path(shared.file).unlink(missing_ok=True)
