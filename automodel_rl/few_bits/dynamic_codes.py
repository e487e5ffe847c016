"""Dynamic 8-bit codes of an optimizer's moments (Dettmers et al., arXiv:2110.02861, sections 2.1 and 3).

A block of consecutive values of a row shares a scale, its largest absolute value. Each value divided by it is rounded
to one of 256 values between -1 or 0 and 1: seven powers of ten, each with twice as many values as the one below it.

Shape letters: I values of a row, B values of a block, b blocks of a row; the last may be short.
"""

import torch
from torch import Tensor

BLOCK = 128
"""Values of a block. Ranks that split a row hold whole blocks of it, as in most layouts of most models."""

BYTES = 1 + 4 / BLOCK
"""Bytes of a value with its part of a scale."""

POWERS = 7


def _tree(is_signed: bool) -> tuple[float, ...]:
    positive = []
    for power in range(POWERS):
        count = 2 ** (power + (0 if is_signed else 1))  # equal parts of 0.1 to 1, with their middles
        width = 0.9 / count
        positive += [10.0 ** (power + 1 - POWERS) * (0.1 + width * (place + 0.5)) for place in range(count)]
    negative = [-value for value in reversed(positive)] if is_signed else []
    return (*negative, 0.0, *positive, 1.0)


SIGNED, UNSIGNED = _tree(True), _tree(False)
"""The values of codes, in rising order."""


def encode(values: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of values.

    Args:
        values: [..., I], not below 0 unless `is_signed`.
        is_signed: which of the two sets of 256 values codes stand for.

    Returns:
        Codes, uint8 [..., I], and scales, float32 [..., b].
    """
    blocks = _blocks(values)
    scales = blocks.abs().amax(-1).float()
    table = torch.tensor(SIGNED if is_signed else UNSIGNED, dtype=values.dtype, device=values.device)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / scales.masked_fill(scales == 0, 1)[..., None].to(values.dtype), between)
    return codes.to(torch.uint8).flatten(-2)[..., : values.shape[-1]], scales


def decode(codes: Tensor, scales: Tensor, is_signed: bool, dtype: torch.dtype) -> Tensor:
    """The values that codes and scales stand for, [..., I].

    Args:
        codes: uint8 [..., I].
        scales: float32 [..., b].
        is_signed: as in `encode`.
        dtype: the dtype of the values.
    """
    table = torch.tensor(SIGNED if is_signed else UNSIGNED, dtype=dtype, device=codes.device)
    blocks = _blocks(table[codes.int()]) * scales[..., None].to(dtype)
    return blocks.flatten(-2)[..., : codes.shape[-1]]


def _blocks(values: Tensor) -> Tensor:
    """Blocks of rows, [..., b, B], the last filled up with zeros."""
    missing = -values.shape[-1] % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).unflatten(-1, (-1, BLOCK))
