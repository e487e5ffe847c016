"""Tensors of the host on their way to a device."""

import torch
from torch import Tensor


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`. From pinned memory, for otherwise the host would wait for the device."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
