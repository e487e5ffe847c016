"""Frozen weights that stay in nf4: codes and scales in place of values (QLoRA; Dettmers et al., arXiv:2305.14314).

Shape letters: ... outputs, with experts before them in a stack; I values of a row, B values of a block.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_rl.compat.compilation import compile_for_any_size
from automodel_rl.few_bits.nf4 import BLOCK, dequantize
from automodel_rl.parallel.sharding import local_tensor, shard_parameter

HOLDER = "few_bits"
"""Name of the submodule that has a module's codes and scales in place of its weights."""


class NF4Weight(nn.Module):
    """A weight [..., I] in nf4. Both parameters are bytes: FSDP casts other parameters of a unit to one dtype.

    Args:
        weight: the weight, without storage. A DTensor is cut along its first dim over a one-axis mesh, and so are codes
            and scales.

    Attributes:
        codes: two codes in a byte, uint8 [..., I / 2].
        scale_bytes: the bytes of float32 scales, uint8 [..., 4 I / B].
        rounded_to: the dtype to which values are rounded: that of the weight that was quantized.
    """

    codes: nn.Parameter
    scale_bytes: nn.Parameter

    def __init__(self, weight: Tensor):
        super().__init__()
        self.rounded_to = torch.float32
        *outputs, inputs = weight.shape
        for name, width in (("codes", inputs // 2), ("scale_bytes", inputs // BLOCK * 4)):
            empty = torch.empty(*outputs, width, dtype=torch.uint8, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
            if isinstance(weight, DTensor):
                shard_parameter(self, name, weight.device_mesh, dim=0)

    @property
    def scales(self) -> Tensor:
        """Scales of this rank's rows, float32 [..., I / B], which share memory with their bytes."""
        return local_tensor(self.scale_bytes).view(torch.float32)

    def values(self) -> Tensor:
        """The values of this rank's rows, [..., I] in the dtype to which they are rounded."""
        return values_of(local_tensor(self.codes), local_tensor(self.scale_bytes), self.rounded_to)

    def plain(self) -> Tensor:
        """A tensor without storage that is laid out over ranks as the plain weight would be, [..., I]."""
        local = torch.empty(*local_tensor(self.codes).shape[:-1], 2 * self.codes.shape[-1], device="meta")
        if not isinstance(self.codes, DTensor):
            return local
        shape = torch.Size((*self.codes.shape[:-1], local.shape[-1]))
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.codes.device_mesh, self.codes.placements, run_check=False, shape=shape, stride=strides
        )


def values_of(codes: Tensor, scale_bytes: Tensor, rounded_to: torch.dtype) -> Tensor:
    """The values of codes and of the bytes of scales, [..., I] in the dtype to which they are rounded."""
    scales = scale_bytes.view(torch.float32)
    return (_rounded_at_once() if codes.is_cuda else _rounded)(codes, scales, rounded_to)


@functools.cache
def _rounded_at_once() -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """`_rounded` in one kernel: written out, it takes 15 bytes for each value for a moment."""
    return compile_for_any_size(_rounded)


def _rounded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize(codes, scales).to(dtype)


def nf4_weight_of(module: nn.Module, name: str) -> Any:
    """The `NF4Weight` in place of one of several weights of a module; None if it is plain."""
    held = dict(module.named_children()).get(HOLDER)
    return None if held is None else dict(held.named_children()).get(name)


def is_few_bits(name: str) -> bool:
    """Whether a parameter, by its name, is a part of a weight in few bits."""
    return f".{HOLDER}." in name
