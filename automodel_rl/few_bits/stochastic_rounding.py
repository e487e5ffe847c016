"""Stochastic rounding of weights to bfloat16, which no layout changes.

A weight changes by less in a step than the distance of two values of bfloat16, so the nearest value would keep it where
it is. It becomes one of its two neighbours instead, each with a probability in proportion to its nearness, and is right
on average (Gupta et al., arXiv:1502.02551). The random numbers are hashes of a step, a name, and a place in the whole
weight: no rank draws them, so a layout and a resumed run round alike.

Shape letters: r rows of a shard, I values of a row.
"""

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from automodel_rl.parallel.sharding import Box

NUM_BITS = 16
"""Bits of a random number: as many as float32 has more than bfloat16."""

_FACTORS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))
"""The factors of MurmurHash3's last step (Appleby, github.com/aappleby/smhasher), as int32."""

_COLUMN_FACTOR = 0x9E3779B1 - (1 << 32)
"""An odd number near 2^32 over the golden ratio, as int32. Hashes of neighbouring columns begin far apart."""


def hashed_rows(shape: Sequence[int], box: Box, step: int, name: str, device: torch.device) -> Tensor:
    """Hashes of the rows of a shard in a step, int32 [r, 1].

    Args:
        shape: the whole weight's shape; its last dim is that of a row's values.
        box: the shard's part of the weight.
        step: the number of the step.
        name: the weight's name.
        device: the device of the result.
    """
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, held in zip(shape[:-1], box[:-1], strict=True):
        rows = (rows[:, None] * size + torch.arange(held.start, held.stop, device=device)).flatten()
    key = zlib.crc32(f"{step} {name}".encode()) - (1 << 31)
    return _mixed((rows % (1 << 31)).to(torch.int32) ^ key)[:, None]


def random_bits(rows: Tensor, columns: Tensor) -> Tensor:
    """Random numbers from 0 to 2^16 - 1 for the values of rows, int32 [r, I].

    Args:
        rows: hashes of the rows, int32 [r, 1].
        columns: places of the values in whole rows, int32 [I].
    """
    return (_mixed(rows + columns * _COLUMN_FACTOR) >> 16) & ((1 << NUM_BITS) - 1)


def round_to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Values in bfloat16, each one of the two nearest. A value of bfloat16 stays what it is.

    Args:
        values: float32 or float64.
        bits: random numbers from 0 to 2^16 - 1, int32 of the shape of values. The larger one is, the nearer to 0 may a
            value be that is rounded away from 0.
    """
    whole = torch.int32 if values.dtype == torch.float32 else torch.int64
    dropped = round(-math.log2(torch.finfo(values.dtype).eps)) - 7  # bfloat16 has 7 bits of a fraction
    moved = values.view(whole) + (bits.to(whole) << (dropped - NUM_BITS))
    rounded = (moved & -(1 << dropped)).view(values.dtype)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _mixed(numbers: Tensor) -> Tensor:
    """Hashes of int32 numbers: every bit depends on all of them."""
    numbers = (numbers ^ ((numbers >> 16) & 0xFFFF)) * _FACTORS[0]
    numbers = (numbers ^ ((numbers >> 13) & 0x7FFFF)) * _FACTORS[1]
    return numbers ^ ((numbers >> 16) & 0xFFFF)
