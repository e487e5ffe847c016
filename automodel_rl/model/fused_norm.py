"""Replaces transformers' chain of elementwise RMSNorm kernels, which dominates a 16-bit step on CUDA, with torch's
fused kernel.

The fused kernel rounds once where the chain rounds twice. fp32 and float64 keep the chain, to match transformers
exactly.
"""

from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def install_fused_norms(
    part: nn.Module, compiled: Iterable[nn.Module], device: torch.device, dtype: torch.dtype
) -> None:
    """Replaces the forward of norms that compute weight * x / rms(x), for bfloat16 on CUDA only.

    Norms within `compiled` modules are left to the compiler, which fuses them.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return
    left = {norm for module in compiled for norm in plain_norms(module)}
    for norm in plain_norms(part):
        if norm not in left:
            norm.forward = MethodType(_fused_forward, norm)


def plain_norms(part: nn.Module) -> Iterator[Any]:
    """Yields norms that compute as Llama's. Gemma's, with another formula, have no `variance_epsilon`;
    nemo_automodel's are torch's own and fused already."""
    for module in part.modules():
        if type(module).__name__.endswith("RMSNorm") and "variance_epsilon" in vars(module):
            yield module


def _fused_forward(norm: Any, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
