"""The most memory that a process has used."""

import resource

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has reserved at most: on its CUDA device, or on the host if it computes there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
