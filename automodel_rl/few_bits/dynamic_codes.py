"""Dynamic 8-bit codes of an optimizer's moments (Dettmers et al., arXiv:2110.02861, sections 2.1 and 3).

A block of consecutive values of a row shares a scale, its largest absolute value. Each value divided by it becomes one
of 256 values up to 1: seven powers of ten, each with twice as many values as the one below it.

A moment changes by less than the distance of two values in a step, so the nearest value would hold it where it is. It
is rounded up or down instead, by a threshold that goes evenly through 0 to 1 from step to step, so that values are
right on average. Thresholds belong to steps and places in blocks, not to ranks or to a generator of random numbers.

Shape letters: I values of a row, B values of a block, b blocks of a row; the last may be short.
"""

import math

import torch
from torch import Tensor

BLOCK = 128
"""Values of a block. Ranks that split a row hold whole blocks of it, as in most layouts of most models."""


def value_bytes(columns: int) -> float:
    """Bytes of a value with its part of a scale, in rows of so many values."""
    return 1 + 4 * -(-columns // BLOCK) / columns


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


def thresholds(step: int) -> Tensor:
    """Thresholds of a step for the values of a block, float64 [B] from 0 to 1: multiples of irrational numbers, modulo
    1, which cover that range evenly from step to step and from place to place."""
    return (step * (math.sqrt(5) - 1) / 2 + torch.arange(BLOCK, dtype=torch.float64) * (math.sqrt(2) - 1)) % 1


def encode(values: Tensor, is_signed: bool, above: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of values.

    Args:
        values: [..., I], not below 0 unless `is_signed`.
        is_signed: which of the two sets of 256 values codes stand for.
        above: a value becomes the larger one of its neighbours if its distance to the smaller one is more than this
            share of theirs, [B].

    Returns:
        Codes, uint8 [..., I], and scales, float32 [..., b].
    """
    blocks = _blocks(values)
    scales = blocks.abs().amax(-1).float()
    table = torch.tensor(SIGNED if is_signed else UNSIGNED, dtype=values.dtype, device=values.device)
    relative = blocks / scales.masked_fill(scales == 0, 1)[..., None].to(values.dtype)
    lower = (torch.bucketize(relative, table, right=True, out_int32=True) - 1).clamp(0, len(table) - 2)
    share = (relative - table[lower]) / (table[lower + 1] - table[lower])
    codes = lower + (share > above)
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
