"""MXFP4 (OCP Microscaling Formats 1.0), the format of gpt-oss's experts.

A block of consecutive values of a row shares a power of two; each value divided by it is a 4-bit number (E2M1). A
byte holds two codes, the first in its lower half. All values are exact in bfloat16.

Shape letters: I values of a row, B values of a block.
"""

import torch
from torch import Tensor

BLOCK = 32
"""Values per block."""

BIAS = 127
"""Bias of exponents. The largest byte is NaN."""

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1, by their bits."""


def powers_of(exponents: Tensor) -> Tensor:
    """Returns the powers of two of biased exponents, uint8, as float32; NaN for the largest byte."""
    powers = torch.ldexp(torch.ones((), device=exponents.device), exponents.to(torch.float32) - BIAS)
    return powers.masked_fill(exponents == 255, torch.nan)


def dequantize(codes: Tensor, exponents: Tensor) -> Tensor:
    """Returns the values of codes, uint8 [..., I / 2], and biased exponents, uint8 [..., I / B], as float32
    [..., I]."""
    numbers = torch.tensor(FP4, device=codes.device)[torch.stack([codes & 0xF, codes >> 4], -1).int().flatten(-2)]
    return (numbers.unflatten(-1, (-1, BLOCK)) * powers_of(exponents)[..., None]).flatten(-2)
