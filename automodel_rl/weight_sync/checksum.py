"""Checksum of a tensor's bits. It is the sum over ranges in any order, and can be adjusted for changed elements."""

import numpy as np
import torch
from torch import Tensor

from automodel_rl.weight_sync.delta import integers_of

BLOCK = 2**22
"""Elements summed at a time on a device, as they are widened to 64 bits."""

ROW = 2**13
"""Row length on the CPU, where summing rows and columns takes a fifteenth of the time of 64-bit products."""


def checksum(elements: Tensor, start: int = 0) -> Tensor:
    """Computes the sum over i of bits[i] * (2 (start + i) + 1), modulo 2 ** 64.

    Every odd factor has an inverse, so changing one element changes the sum, as does swapping two elements that
    differ.

    Args:
        elements: a range of a flattened tensor, contiguous.
        start: index of the range in the tensor. The checksums of all ranges add up to that of the tensor.

    Returns:
        An int64 scalar on the device of the elements.
    """
    bits = integers_of(elements)
    if bits.device.type == "cpu":
        return torch.tensor(_sum_on_cpu(bits.numpy(), start))
    total = torch.zeros((), dtype=torch.int64, device=elements.device)
    for begin in range(0, len(bits), BLOCK):
        block = bits[begin : begin + BLOCK].to(torch.int64)
        first = 2 * (start + begin) + 1
        factors = torch.arange(first, first + 2 * len(block), 2, device=elements.device)
        total += (block * factors).sum()
    return total


def change_of_checksum(before: np.ndarray, after: np.ndarray, indices: np.ndarray) -> int:
    """Returns the change of a tensor's checksum when some elements change.

    Args:
        before, after: [n] signed integers; the bits of these elements.
        indices: [n] int64; their indices in the flattened tensor.
    """
    return int(((after.astype(np.int64) - before) * (2 * indices + 1)).sum())


def _sum_on_cpu(bits: np.ndarray, start: int) -> int:
    whole = len(bits) // ROW * ROW
    rows = bits[:whole].reshape(-1, ROW)
    rest, first = bits[whole:].astype(np.int64), 2 * (start + whole) + 1
    by_column = rows.sum(0, dtype=np.int64) * np.arange(1, 1 + 2 * ROW, 2)
    by_row = rows.sum(1, dtype=np.int64) * np.arange(2 * start, 2 * (start + whole), 2 * ROW)
    of_rest = rest * np.arange(first, first + 2 * len(rest), 2)
    return int(np.concatenate((by_column, by_row, of_rest)).sum())
