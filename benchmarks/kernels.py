"""Kernel time of a step by kind, from torch's profiler."""

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

KINDS = {
    "collectives": r"nccl",
    "attention": r"flash|fmha|cudnn_generated",
    "AdamW": r"adam",
    "matrix products": r"gemm|nvjet|xmma|cutlass|splitkreduce",
    "compiled": r"triton",
    "foreach": r"multi_tensor_apply",
    "index, sort": r"index|scatter|gather|sort|search|embedding|topk|radix",
    "copies": r"memcpy|memset|catarray|split_with|chunk_cat|copy",
    "norms": r"norm|gammabeta",
    "reductions": r"reduce|scan",
    "elementwise": r"elementwise",
}
"""Kinds by what the lower-case names of their kernels contain; the first that fits counts."""


def kernel_times(run: Callable[[], object], most: int = 0) -> dict[str, Any]:
    """Milliseconds on the device of everything that `run` starts, by kind, and the number of kernels.

    Args:
        run: a step.
        most: number of single kernels to list, the longest first.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            milliseconds = event.device_time_total / 1000
            kinds[kind_of(event.name)] += milliseconds
            names[event.name].append(milliseconds)
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:most]
    return {
        "kernels": sum(map(len, names.values())),
        "kernel_ms": {kind: round(total, 1) for kind, total in sorted(kinds.items(), key=lambda item: -item[1])},
        **({"longest": [(name[:110], round(sum(times), 2), len(times)) for name, times in longest]} if most else {}),
    }


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), "other")
