"""Formats of frozen weights in few bits. In all of them a row has codes, and a scale for each block of its values.

Shape letters: I values of a row, b blocks of a row; the last may be short.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_rl.few_bits import mxfp4, nf4

FP8_BLOCK = 128
"""Values of a row that share a scale in fp8, as in DeepSeek-V3's files (arXiv:2412.19437, section 3.3.2). A scale of
several rows, or of longer stretches of them, is kept as often: 3% more bytes."""


@dataclass(frozen=True)
class Format:
    """A format of weights in few bits.

    Attributes:
        block: values of a row that share a scale.
        per_byte: values in a byte.
        scale_bytes: bytes of a scale.
        dequantize: gives the values, float32 [..., I], of codes, uint8 [..., I / per_byte], and the bytes of scales,
            uint8 [..., scale_bytes b].
        scales: gives the scales of their bytes, float32 [..., b]; one is not finite if a value is not.
    """

    block: int
    per_byte: int
    scale_bytes: int
    dequantize: Callable[[Tensor, Tensor], Tensor]
    scales: Callable[[Tensor], Tensor]

    def widths(self, columns: int) -> tuple[int, int]:
        """Bytes of the codes of a row of so many values, and of its scales."""
        return columns // self.per_byte, -(-columns // self.block) * self.scale_bytes

    @property
    def value_bytes(self) -> float:
        """Bytes of a value with its part of a scale, in rows of whole blocks."""
        return 1 / self.per_byte + self.scale_bytes / self.block


def _as_floats(scale_bytes: Tensor) -> Tensor:
    return scale_bytes.view(torch.float32)


def _nf4(codes: Tensor, scale_bytes: Tensor) -> Tensor:
    return nf4.dequantize(codes, scale_bytes.view(torch.float32))


def _fp8(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    def dequantize(codes: Tensor, scale_bytes: Tensor) -> Tensor:
        values = codes.view(dtype).to(torch.float32)
        scales = scale_bytes.view(torch.float32).repeat_interleave(FP8_BLOCK, -1)
        return values * scales[..., : values.shape[-1]]

    return dequantize


FORMATS = {
    "nf4": Format(nf4.BLOCK, 2, 4, _nf4, _as_floats),
    "mxfp4": Format(mxfp4.BLOCK, 2, 1, mxfp4.dequantize, mxfp4.powers_of),
    "fp8_e4m3": Format(FP8_BLOCK, 1, 4, _fp8(torch.float8_e4m3fn), _as_floats),
    "fp8_e5m2": Format(FP8_BLOCK, 1, 4, _fp8(torch.float8_e5m2), _as_floats),
}
"""Formats by name."""


@dataclass(frozen=True)
class Kept:
    """How one weight is kept in few bits.

    Attributes:
        format: the name of its format.
        is_turned: whether codes and scales are those of the transposes of the model's matrices.
    """

    format: str
    is_turned: bool = False
