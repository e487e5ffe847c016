"""Peak memory of a process."""

import resource

import torch


def peak_memory(device: torch.device) -> int:
    """Returns the peak bytes reserved on the CUDA device, or the peak resident memory of the process for the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
