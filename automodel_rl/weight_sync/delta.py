"""Deltas: which numbers of a tensor differ from its version before, and how, bit for bit.

A step of reinforcement learning changes few of a model's weights in bfloat16: most updates are smaller than half of the
last bit. A delta has a bit for every number, and for those that changed the exclusive or of their bits, which is nearly
always zero but for the last ones. Compressed, both are small.
"""

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def delta_of(before: Tensor, after: Tensor) -> bytes | None:
    """What makes one version of numbers from another; None if nothing has changed.

    Args:
        before, after: [n] of one dtype on the CPU, contiguous.
    """
    old, new = _bits(before), _bits(after)
    changed = old != new
    if not changed.any():
        return None
    return np.packbits(changed, bitorder="little").tobytes() + (old ^ new)[changed].tobytes()


def apply_delta(numbers: Tensor, delta: bytes) -> None:
    """Makes the version after from the one before, in place.

    Args:
        numbers: [n] on the CPU, contiguous; the version before.
        delta: of `delta_of`.

    Raises:
        ValueError: the delta is of another number of numbers.
    """
    bits = _bits(numbers)
    size = -(-len(bits) // 8)
    changed = np.unpackbits(np.frombuffer(delta[:size], np.uint8), count=len(bits), bitorder="little").astype(bool)
    if len(delta) - size != changed.sum() * bits.itemsize:
        raise ValueError(f"a delta of {len(delta)} bytes is none of {len(bits)} numbers with {changed.sum()} changes")
    differences = np.frombuffer(delta[size:], bits.dtype)
    bits[changed] ^= differences


def num_changed(delta: bytes | None, numel: int, itemsize: int) -> int:
    """The number of changed numbers among so many, by their delta."""
    return 0 if delta is None else (len(delta) - -(-numel // 8)) // itemsize


def _bits(numbers: Tensor) -> np.ndarray:
    return numbers.detach().view(-1).view(_INTEGERS[numbers.element_size()]).numpy()
