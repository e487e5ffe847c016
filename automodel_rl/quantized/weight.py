"""Frozen quantized weights: codes and scales in place of values (QLoRA; Dettmers et al., arXiv:2305.14314).

Shape letters: ... outputs, with experts before them in a stack; I values of a row, b blocks of a row.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_rl.compat.compilation import compile_for_any_size
from automodel_rl.parallel.sharding import Box, cuts_of, local_tensor, shard_parameter
from automodel_rl.quantized.formats import FORMATS, Format, QuantizedFormat

MAX_VALUES = 1 << 24
"""Maximum number of values dequantized at a time for inspection."""

HOLDER = "quantized"
"""Name of the submodule that holds a module's codes and scales."""


class QuantizedWeight(nn.Module):
    """A quantized weight [..., I]. Both parameters are bytes, because FSDP casts other parameters of a unit to one
    dtype.

    Args:
        weight: the weight, without storage. A DTensor is cut over a one-axis mesh, as are then codes and scales.

    Attributes:
        codes: uint8 [..., I / values per byte].
        scale_bytes: uint8 [..., b * bytes per scale].
        rounded_to: the dtype to which values are rounded: the original weight's.
    """

    codes: nn.Parameter
    scale_bytes: nn.Parameter

    def __init__(self, weight: Tensor, quantized_format: QuantizedFormat):
        super().__init__()
        self.rounded_to, self.quantized_format = torch.float32, quantized_format
        *outputs, inputs = (weight.mT if quantized_format.is_transposed else weight).shape
        for name, width in zip(("codes", "scale_bytes"), self.format.widths(inputs), strict=True):
            empty = torch.empty(*outputs, width, dtype=torch.uint8, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
            if isinstance(weight, DTensor):
                (cut,) = cuts_of(weight)
                assert cut.dim == 0 or not quantized_format.is_transposed  # only ep cuts stacks
                shard_parameter(self, name, weight.device_mesh, cut.dim)

    @property
    def format(self) -> Format:
        return FORMATS[self.quantized_format.format]

    @property
    def scales(self) -> Tensor:
        """Scales of this rank's rows, float32 [..., b]."""
        return self.format.scales(local_tensor(self.scale_bytes))

    def numbers(self) -> Iterator[Tensor]:
        """Yields tensors that hold an inf or nan exactly if the dequantized weight does: the scales and, for 8-bit
        formats, the values, 16M at a time."""
        yield self.scales
        if self.format.per_byte == 1:  # 8-bit formats have codes for inf or nan
            codes, scale_bytes = local_tensor(self.codes), local_tensor(self.scale_bytes)
            count = max(1, MAX_VALUES * len(codes) // max(1, codes.numel()))
            for of in zip(codes.split(count), scale_bytes.split(count), strict=True):
                yield values_of(*of, self.quantized_format.format, torch.bfloat16)

    def values(self) -> Tensor:
        """Returns this rank's part of the model's weight, dequantized and rounded to `rounded_to`."""
        codes, scale_bytes = local_tensor(self.codes), local_tensor(self.scale_bytes)
        return self._as_in_model(values_of(codes, scale_bytes, self.quantized_format.format, self.rounded_to))

    def plain(self) -> Tensor:
        """Returns a tensor without storage, laid out over ranks like the plain weight."""
        whole, local = (self._plain(tensor.shape) for tensor in (self.codes, local_tensor(self.codes)))
        if not isinstance(self.codes, DTensor):
            return local
        shape = whole.shape
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.codes.device_mesh, self.codes.placements, run_check=False, shape=shape, stride=strides
        )

    def stored_box(self, box: Box) -> Box:
        """Converts a box of the model's weight to one of codes and scales, with columns counted in values."""
        return (*box[:-2], box[-1], box[-2]) if self.quantized_format.is_transposed else box

    def _plain(self, codes: torch.Size) -> Tensor:
        return self._as_in_model(torch.empty(*codes[:-1], codes[-1] * self.format.per_byte, device="meta"))

    def _as_in_model(self, rows: Tensor) -> Tensor:
        return rows.mT if self.quantized_format.is_transposed else rows


def values_of(codes: Tensor, scale_bytes: Tensor, name: str, rounded_to: torch.dtype) -> Tensor:
    """Dequantizes codes and scale bytes to [..., I] in `rounded_to`. `name` is that of the format."""
    return (_at_once(name) if codes.is_cuda else _rounded)(codes, scale_bytes, name, rounded_to)


@functools.cache
def _at_once(name: str) -> Callable[[Tensor, Tensor, str, torch.dtype], Tensor]:
    """Returns `_rounded` compiled to one kernel per format: uncompiled, nf4 needs 15 bytes per value temporarily."""
    return compile_for_any_size(_rounded)


def _rounded(codes: Tensor, scale_bytes: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    return FORMATS[name].dequantize(codes, scale_bytes).to(dtype)


def quantized_weight_of(module: nn.Module, name: str) -> Any:
    """Returns the `QuantizedWeight` of one of a module's weights; None if it is plain."""
    held = dict(module.named_children()).get(HOLDER)
    return None if held is None else dict(held.named_children()).get(name)


def is_quantized(name: str) -> bool:
    """Returns whether a parameter name belongs to a quantized weight."""
    return f".{HOLDER}." in name
