"""Formats of frozen quantized weights. In all of them a row has codes, and a scale per block of its values.

Shape letters: I values of a row, b blocks of a row; the last may be short.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_rl.quantized import mxfp4, nf4

FP8_BLOCK = 128
"""Values of a row per scale in fp8, as in DeepSeek-V3's files (arXiv:2412.19437, section 3.3.2). Scales shared by
several rows or longer blocks are repeated to match, for 3% more bytes."""


@dataclass(frozen=True)
class Format:
    """A format of quantized weights.

    Attributes:
        dequantize: codes, uint8 [..., I / per_byte], and scale bytes, uint8 [..., scale_bytes b] -> values, float32
            [..., I].
        scales: scale bytes -> scales, float32 [..., b]; a scale is inf or nan if that makes a value so.
    """

    block: int
    per_byte: int
    scale_bytes: int
    dequantize: Callable[[Tensor, Tensor], Tensor]
    scales: Callable[[Tensor], Tensor]

    def widths(self, columns: int) -> tuple[int, int]:
        """Returns the bytes of codes and of scales in a row of this many values."""
        return columns // self.per_byte, -(-columns // self.block) * self.scale_bytes

    @property
    def value_bytes(self) -> float:
        """Bytes per value, including its share of a scale, in rows of whole blocks."""
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
class QuantizedFormat:
    """The quantized format of one weight.

    Attributes:
        format: a key of `FORMATS`.
        is_transposed: whether codes and scales belong to the transposes of the model's matrices.
    """

    format: str
    is_transposed: bool = False
