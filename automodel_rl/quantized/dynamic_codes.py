"""Dynamic 8-bit codes of optimizer moments (Dettmers et al., arXiv:2110.02861, sections 2.1 and 3).

A block of consecutive values of a row shares a scale, its largest absolute value; each value divided by it becomes
one of 256 values up to 1: seven powers of ten, each with twice as many values as the one below.

A step changes a moment by less than the spacing of two values, so rounding to nearest would undo it. Instead it is
rounded up or down by a threshold that covers 0 to 1 evenly over steps, correct on average. Thresholds depend on step
and index in the block, not on ranks or a random generator.

Shape letters: I values of a row, B values of a block, b blocks of a row; the last may be short.
"""

import math

import torch
from torch import Tensor

BLOCK = 128
"""Values per block. In most layouts of most models, ranks that split a row hold whole blocks of it."""


def value_bytes(columns: int) -> float:
    """Returns the bytes per value, including its share of a scale, in rows of `columns` values."""
    return 1 + 4 * -(-columns // BLOCK) / columns


POWERS = 7


def _tree(is_signed: bool) -> tuple[float, ...]:
    positive = []
    for power in range(POWERS):
        count = 2 ** (power + (0 if is_signed else 1))  # midpoints of equal parts of 0.1 to 1
        width = 0.9 / count
        positive += [10.0 ** (power + 1 - POWERS) * (0.1 + width * (place + 0.5)) for place in range(count)]
    negative = [-value for value in reversed(positive)] if is_signed else []
    return (*negative, 0.0, *positive, 1.0)


SIGNED, UNSIGNED = _tree(True), _tree(False)
"""The values of codes, ascending."""


def thresholds(step: int) -> Tensor:
    """Returns a step's thresholds for the values of a block, float64 [B] in 0 to 1: multiples of irrational numbers
    modulo 1, which cover the range evenly over steps and indices."""
    return (step * (math.sqrt(5) - 1) / 2 + torch.arange(BLOCK, dtype=torch.float64) * (math.sqrt(2) - 1)) % 1


def encode(values: Tensor, is_signed: bool, above: Tensor) -> tuple[Tensor, Tensor]:
    """Encodes values [..., I] to codes, uint8 [..., I], and scales, float32 [..., b].

    Args:
        values: non-negative unless `is_signed`.
        is_signed: selects the set of 256 values.
        above: thresholds [B]: a value becomes its upper neighbour if its relative distance from the lower one exceeds
            this.
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
    """Returns the values [..., I] of codes, uint8 [..., I], and scales, float32 [..., b]."""
    table = torch.tensor(SIGNED if is_signed else UNSIGNED, dtype=dtype, device=codes.device)
    blocks = _blocks(table[codes.int()]) * scales[..., None].to(dtype)
    return blocks.flatten(-2)[..., : codes.shape[-1]]


def _blocks(values: Tensor) -> Tensor:
    """Splits rows into blocks, [..., b, B], the last zero-padded."""
    missing = -values.shape[-1] % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).unflatten(-1, (-1, BLOCK))
