"""Copies of tensors from the host to a device."""

import torch
from torch import Tensor


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to `device`. A copy from the host to CUDA goes through pinned memory, so the host does not
    wait."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
