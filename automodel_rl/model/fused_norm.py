"""Puts torch's fused RMSNorm in place of transformers' chain of elementwise kernels.

The chain dominates a 16-bit step on CUDA. The fused kernel rounds once where the chain rounds twice. In fp32 and
float64 the chain stays, for its exact results.
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
    """Replaces the forward of a part's norms, which compute weight * x / rms(x), if it runs in bfloat16 on CUDA.

    Args:
        part: the part with the norms.
        compiled: modules whose norms are left as they are, since the compiler fuses them.
        device, dtype: device and dtype of the computation.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return
    left = {norm for module in compiled for norm in plain_norms(module)}
    for norm in plain_norms(part):
        if norm not in left:
            norm.forward = MethodType(_fused_forward, norm)


def plain_norms(part: nn.Module) -> Iterator[Any]:
    """The norms that transformers writes out as Llama's. Gemma's compute otherwise, and have no `variance_epsilon`;
    torch's own, which nemo_automodel's classes have, are fused already."""
    for module in part.modules():
        if type(module).__name__.endswith("RMSNorm") and "variance_epsilon" in vars(module):
            yield module


def _fused_forward(norm: Any, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
