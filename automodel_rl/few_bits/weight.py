"""Frozen weights that stay in few bits: codes and scales in place of values (QLoRA; Dettmers et al., arXiv:2305.14314).

Shape letters: ... outputs, with experts before them in a stack; I values of a row, b blocks of a row.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_rl.compat.compilation import compile_for_any_size
from automodel_rl.few_bits.formats import FORMATS, Format, Kept
from automodel_rl.parallel.sharding import Box, cuts_of, local_tensor, shard_parameter

MOST_VALUES = 1 << 24
"""Most values that are made plain at a time to look at them."""

HOLDER = "few_bits"
"""Name of the submodule that has a module's codes and scales in place of its weights."""


class FewBitsWeight(nn.Module):
    """A weight [..., I] in few bits. Both parameters are bytes: FSDP casts other parameters of a unit to one dtype.

    Args:
        weight: the weight, without storage. A DTensor is cut over a one-axis mesh, and so are codes and scales.
        kept: how it is kept.

    Attributes:
        codes: uint8 [..., I] in as many bytes as the format takes.
        scale_bytes: the bytes of scales, uint8 [..., as many as b take].
        rounded_to: the dtype to which values are rounded: that of the weight that was quantized.
    """

    codes: nn.Parameter
    scale_bytes: nn.Parameter

    def __init__(self, weight: Tensor, kept: Kept):
        super().__init__()
        self.rounded_to, self.kept = torch.float32, kept
        *outputs, inputs = (weight.mT if kept.is_turned else weight).shape
        for name, width in zip(("codes", "scale_bytes"), self.format.widths(inputs), strict=True):
            empty = torch.empty(*outputs, width, dtype=torch.uint8, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
            if isinstance(weight, DTensor):
                (cut,) = cuts_of(weight)
                assert cut.dim == 0 or not kept.is_turned  # only ep cuts stacks
                shard_parameter(self, name, weight.device_mesh, cut.dim)

    @property
    def format(self) -> Format:
        """Its format."""
        return FORMATS[self.kept.format]

    @property
    def scales(self) -> Tensor:
        """Scales of this rank's rows, float32 [..., b]."""
        return self.format.scales(local_tensor(self.scale_bytes))

    def numbers(self) -> Iterator[Tensor]:
        """Numbers of which one is not finite if a value is not: scales, and codes that may stand for such values."""
        yield self.scales
        if self.format.per_byte == 1:  # as many bits have codes of what is no number
            codes, scale_bytes = local_tensor(self.codes), local_tensor(self.scale_bytes)
            count = max(1, MOST_VALUES * len(codes) // max(1, codes.numel()))
            for of in zip(codes.split(count), scale_bytes.split(count), strict=True):
                yield values_of(*of, self.kept.format, torch.bfloat16)

    def values(self) -> Tensor:
        """The values of this rank's part of the model's weight, in the dtype to which they are rounded."""
        codes, scale_bytes = local_tensor(self.codes), local_tensor(self.scale_bytes)
        return self._as_in_model(values_of(codes, scale_bytes, self.kept.format, self.rounded_to))

    def plain(self) -> Tensor:
        """A tensor without storage that is laid out over ranks as the plain weight would be."""
        whole, local = (self._plain(tensor.shape) for tensor in (self.codes, local_tensor(self.codes)))
        if not isinstance(self.codes, DTensor):
            return local
        shape = whole.shape
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.codes.device_mesh, self.codes.placements, run_check=False, shape=shape, stride=strides
        )

    def turned(self, box: Box) -> Box:
        """A box of the model's weight as one of codes and scales, with columns counted in values."""
        return (*box[:-2], box[-1], box[-2]) if self.kept.is_turned else box

    def _plain(self, codes: torch.Size) -> Tensor:
        return self._as_in_model(torch.empty(*codes[:-1], codes[-1] * self.format.per_byte, device="meta"))

    def _as_in_model(self, rows: Tensor) -> Tensor:
        return rows.mT if self.kept.is_turned else rows


def values_of(codes: Tensor, scale_bytes: Tensor, name: str, rounded_to: torch.dtype) -> Tensor:
    """The values of codes and of the bytes of scales, [..., I] in the dtype to which they are rounded.

    Args:
        codes, scale_bytes, rounded_to: those of a `FewBitsWeight`.
        name: the name of its format.
    """
    return (_at_once(name) if codes.is_cuda else _rounded)(codes, scale_bytes, name, rounded_to)


@functools.cache
def _at_once(name: str) -> Callable[[Tensor, Tensor, str, torch.dtype], Tensor]:
    """`_rounded` in one kernel for a format: written out, nf4 takes 15 bytes for each value for a moment."""
    return compile_for_any_size(_rounded)


def _rounded(codes: Tensor, scale_bytes: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    return FORMATS[name].dequantize(codes, scale_bytes).to(dtype)


def few_bits_weight_of(module: nn.Module, name: str) -> Any:
    """The `FewBitsWeight` in place of one of several weights of a module; None if it is plain."""
    held = dict(module.named_children()).get(HOLDER)
    return None if held is None else dict(held.named_children()).get(name)


def is_few_bits(name: str) -> bool:
    """Whether a parameter, by its name, is a part of a weight in few bits."""
    return f".{HOLDER}." in name
