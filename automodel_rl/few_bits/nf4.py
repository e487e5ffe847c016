"""nf4, the 4-bit format of QLoRA (Dettmers et al., arXiv:2305.14314, section 3), in the layout of bitsandbytes.

A block of consecutive values of a row shares a scale, its largest absolute value. Each value divided by it is rounded
to one of 16 quantiles of the normal distribution. Two codes are in a byte, the first one in its upper half.

Shape letters: I values of a row, B values of a block.
"""

import torch
from torch import Tensor

BLOCK = 64
"""Values of a block."""

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
    """Codes and scales of values.

    Args:
        values: [..., I] with whole blocks in a row.

    Returns:
        Codes, uint8 [..., I / 2], and scales, float32 [..., I / B]. Values that are not finite make their scale so.
    """
    blocks = values.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    quantiles = values.new_tensor(VALUES, dtype=torch.float32)
    between = (quantiles[1:] + quantiles[:-1]) / 2
    # A block of zeros has scale 0, and any divisor gives its values their code.
    codes = torch.bucketize(blocks / scales.masked_fill(scales == 0, 1)[..., None], between).flatten(-2)
    return pack(codes), scales


def pack(codes: Tensor) -> Tensor:
    """Codes 0 to 15, [..., I] of any integer dtype, as bytes [..., I / 2]."""
    first, second = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return first << 4 | second


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The values that codes and scales stand for, float32 [..., I].

    Args:
        codes: uint8 [..., I / 2].
        scales: float32 [..., I / B].
    """
    return (quantiles_of(codes).unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)


def quantiles_of(codes: Tensor) -> Tensor:
    """The quantiles of codes, uint8 [..., I / 2], as float32 [..., I]."""
    quantiles = torch.tensor(VALUES, device=codes.device)
    return quantiles[torch.stack([codes >> 4, codes & 0xF], -1).int()].flatten(-2)
