"""Stochastic rounding of weights to bfloat16, independent of the layout.

A step changes a weight by less than the spacing of bfloat16 values, so rounding to nearest would undo it. Instead it
becomes one of its two neighbours, with probabilities that make it correct on average (Gupta et al.,
arXiv:1502.02551). The random numbers are hashes of step, name, and index in the whole weight, so all layouts and
resumed runs round alike.

Shape letters: r rows of a shard, I values of a row.
"""

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from automodel_rl.parallel.sharding import Box

NUM_BITS = 16
"""Bits of a random number: the bits that float32 has beyond bfloat16."""

_FACTORS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))
"""Factors of MurmurHash3's finaliser (Appleby, github.com/aappleby/smhasher), as int32."""

_COLUMN_FACTOR = 0x9E3779B1 - (1 << 32)
"""An odd number near 2^32 / golden ratio, as int32, which spreads the hashes of neighbouring columns."""


def hashed_rows(shape: Sequence[int], box: Box, step: int, name: str, device: torch.device) -> Tensor:
    """Returns hashes of a shard's rows in a step, int32 [r, 1]."""
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, held in zip(shape[:-1], box[:-1], strict=True):
        rows = (rows[:, None] * size + torch.arange(held.start, held.stop, device=device)).flatten()
    key = zlib.crc32(f"{step} {name}".encode()) - (1 << 31)
    return _mixed((rows % (1 << 31)).to(torch.int32) ^ key)[:, None]


def random_bits(rows: Tensor, columns: Tensor) -> Tensor:
    """Returns random numbers from 0 to 2^16 - 1, int32 [r, I], for row hashes, int32 [r, 1], and column indices in
    whole rows, int32 [I]."""
    return (_mixed(rows + columns * _COLUMN_FACTOR) >> 16) & ((1 << NUM_BITS) - 1)


def round_to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Rounds float32 or float64 values to one of the two nearest bfloat16 values; exact ones are unchanged.

    Args:
        bits: random numbers from 0 to 2^16 - 1, int32, shaped like `values`. The larger, the more likely is rounding
            away from 0.
    """
    whole = torch.int32 if values.dtype == torch.float32 else torch.int64
    dropped = round(-math.log2(torch.finfo(values.dtype).eps)) - 7  # bfloat16 has 7 bits of a fraction
    moved = values.view(whole) + (bits.to(whole) << (dropped - NUM_BITS))
    rounded = (moved & -(1 << dropped)).view(values.dtype)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _mixed(numbers: Tensor) -> Tensor:
    """Hashes int32 numbers: every output bit depends on all input bits."""
    numbers = (numbers ^ ((numbers >> 16) & 0xFFFF)) * _FACTORS[0]
    numbers = (numbers ^ ((numbers >> 13) & 0x7FFFF)) * _FACTORS[1]
    return numbers ^ ((numbers >> 16) & 0xFFFF)
