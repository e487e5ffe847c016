"""Deltas: which numbers of a tensor differ from its previous version, and how, bit for bit.

A step of reinforcement learning changes few of a model's bfloat16 weights: most steps are smaller than half of the
last bit. A delta has one bit for every number, and the exclusive or of the old and new bits for the changed ones, of
which mostly the low bits are set. Both compress well.
"""

import numpy as np
import torch
from torch import Tensor

STRETCH = 2**24
"""Numbers compared at a time, to bound the device memory this takes. A multiple of 8."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_EIGHT_BITS = 0x0102040810204080
"""Factor that gathers eight bytes of 0 or 1 in the highest byte, the first as the lowest bit."""


def delta_of(before: Tensor, after: Tensor) -> bytes | None:
    """Returns the delta between two versions of numbers; None if they are equal.

    Args:
        before: [n] on the CPU, contiguous.
        after: [n] of the same dtype, contiguous, on the device that compares them.
    """
    masks, differences = list[Tensor](), list[Tensor]()
    for old, new in zip(integers_of(before).split(STRETCH), integers_of(after).split(STRETCH), strict=True):
        difference = old.to(new.device) ^ new
        changed = difference != 0
        masks.append(_pack(changed).cpu())
        differences.append(difference[changed].cpu())
    values = torch.cat(differences)
    return torch.cat(masks).numpy().tobytes() + values.numpy().tobytes() if len(values) else None


def changes_of(delta: bytes, numel: int, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """Decodes a delta of `numel` numbers of `itemsize` bytes. Raises ValueError if it does not fit.

    Returns:
        [n] int64, the ascending indices of changed numbers, and [n] signed integers, the exclusive or of old and
        new bits.
    """
    size = -(-numel // 8)
    mask = np.frombuffer(delta, np.uint8, min(size, len(delta)))
    some = np.flatnonzero(mask != 0)  # most eights have no change in them
    changed = np.flatnonzero(np.unpackbits(mask[some], bitorder="little").view(bool))
    indices = 8 * some[changed >> 3] + (changed & 7)
    if len(delta) - size != len(indices) * itemsize or (len(indices) and indices[-1] >= numel):
        raise ValueError(f"a delta of {len(delta)} bytes does not fit {numel} numbers with {len(indices)} changes")
    return indices, np.frombuffer(delta, f"i{itemsize}", offset=size)


def num_changed(delta: bytes | None, numel: int, itemsize: int) -> int:
    return 0 if delta is None else (len(delta) - -(-numel // 8)) // itemsize


def bits_of(numbers: Tensor) -> np.ndarray:
    """Returns the bits of numbers on the CPU as signed integers that share their memory."""
    return integers_of(numbers).numpy()


def integers_of(numbers: Tensor) -> Tensor:
    """Returns the bits of numbers as signed integers, [n], that share their memory."""
    return numbers.detach().view(-1).view(_INTEGERS[numbers.element_size()])


def _pack(changed: Tensor) -> Tensor:
    """Packs [n] bool into [n / 8] uint8, the first of eight as the lowest bit."""
    padded = torch.nn.functional.pad(changed.view(torch.uint8), (0, -len(changed) % 8))
    return ((padded.view(torch.int64) * _EIGHT_BITS >> 56) & 255).to(torch.uint8)
