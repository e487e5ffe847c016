"""Master weights in bfloat16 in one process: what a step's stochastic rounding leaves, by fractions and not by bits."""

import zlib

import numpy as np
import torch
from torch import Tensor


def rounded(weight: Tensor, step: int, name: str) -> Tensor:
    """A whole weight after the stochastic rounding of a step.

    Args:
        weight: float64 [..., I].
        step: the number of the step, from 1.
        name: the weight's name.

    Returns:
        Values of bfloat16, as float64 [..., I].
    """
    values = weight.detach().cpu().numpy()
    fraction, exponent = np.frexp(values)
    near_zero = np.trunc(fraction * 2**8)  # bfloat16 has 8 bits, with the one that it does not store
    share = np.abs(fraction * 2**8 - near_zero)
    goes_away = share + _numbers(values.shape, step, name) / 2**16 >= 1
    found = np.ldexp(near_zero + np.sign(values) * goes_away, exponent - 8)
    return torch.from_numpy(found).to(weight.device)


def _numbers(shape: tuple[int, ...], step: int, name: str) -> np.ndarray:
    """Numbers from 0 to 2^16 - 1 for each place of a weight in a step."""
    is_end = name.endswith(("lm_head.weight", "embed_tokens.weight"))
    key = np.uint32((zlib.crc32(f"{step} {'' if is_end else name}".encode()) + 2**31) % 2**32)
    rows = np.arange(np.prod(shape[:-1], dtype=np.int64), dtype=np.uint32)
    columns = np.arange(shape[-1], dtype=np.uint32) * np.uint32(0x9E3779B1)
    return (_murmur3(_murmur3(rows ^ key)[:, None] + columns) >> np.uint32(16)).reshape(shape)


def _murmur3(numbers: np.ndarray) -> np.ndarray:
    """MurmurHash3's finalizer of 32 bits (github.com/aappleby/smhasher), uint32."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        numbers = (numbers ^ (numbers >> np.uint32(shift))) * np.uint32(factor)
    return numbers
