"""nf4, the 4-bit format of QLoRA (Dettmers et al., arXiv:2305.14314, section 3), in bitsandbytes' layout.

A block of consecutive values of a row shares a scale, its largest absolute value; each value divided by it is rounded
to one of 16 quantiles of the normal distribution. A byte holds two codes, the first in its upper half.

Shape letters: I values of a row, B values of a block.
"""

import torch
from torch import Tensor

BLOCK = 64
"""Values per block."""

# Appendix E of the paper.
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The quantiles, by their codes."""


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes values [..., I] with whole blocks per row to codes, uint8 [..., I / 2], and scales, float32
    [..., I / B]. Infinite or NaN values make their scale so."""
    blocks = values.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    quantiles = values.new_tensor(VALUES, dtype=torch.float32)
    between = (quantiles[1:] + quantiles[:-1]) / 2
    # A block of zeros has scale 0; any divisor gives the right codes.
    codes = torch.bucketize(blocks / scales.masked_fill(scales == 0, 1)[..., None], between).flatten(-2)
    return pack(codes), scales


def pack(codes: Tensor) -> Tensor:
    """Packs codes 0 to 15, [..., I] of any integer dtype, into bytes [..., I / 2]."""
    first, second = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return first << 4 | second


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the values of codes, uint8 [..., I / 2], and scales, float32 [..., I / B], as float32 [..., I]."""
    return (quantiles_of(codes).unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)


def quantiles_of(codes: Tensor) -> Tensor:
    """Returns the quantiles of codes, uint8 [..., I / 2], as float32 [..., I]."""
    quantiles = torch.tensor(VALUES, device=codes.device)
    return quantiles[torch.stack([codes >> 4, codes & 0xF], -1).int()].flatten(-2)
