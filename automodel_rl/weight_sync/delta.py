"""Deltas: which numbers of a tensor differ from its version before, and how, bit for bit.

A step of reinforcement learning changes few of a model's weights in bfloat16: most updates are smaller than half of the
last bit. A delta has a bit for every number, and for those that changed the exclusive or of their bits, which is nearly
always zero but for the last ones. Compressed, both are small.
"""

import numpy as np
import torch
from torch import Tensor

STRETCH = 2**24
"""Numbers that are compared at once, which bounds what that takes on a device. A multiple of 8."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_EIGHT_BITS = 0x0102040810204080
"""Times eight bytes that are 0 or 1: the highest byte has them as bits, the first as the lowest."""


def delta_of(before: Tensor, after: Tensor) -> bytes | None:
    """What makes one version of numbers from another; None if nothing has changed.

    Args:
        before: [n] on the CPU, contiguous.
        after: [n] of the same dtype on any device, contiguous. There the two are compared.
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
    """What a delta changes.

    Args:
        delta: of `delta_of`.
        numel: number of the numbers that it is of.
        itemsize: bytes of a number.

    Returns:
        [n] int64, the places of what changes, in order, and [n] signed integers, the exclusive or of the bits before
        and after.

    Raises:
        ValueError: the delta is of another number of numbers.
    """
    size = -(-numel // 8)
    mask = np.frombuffer(delta, np.uint8, min(size, len(delta)))
    some = np.flatnonzero(mask != 0)  # most eights have no change in them
    changed = np.flatnonzero(np.unpackbits(mask[some], bitorder="little").view(bool))
    places = 8 * some[changed >> 3] + (changed & 7)
    if len(delta) - size != len(places) * itemsize or (len(places) and places[-1] >= numel):
        raise ValueError(f"a delta of {len(delta)} bytes is none of {numel} numbers with {len(places)} changes")
    return places, np.frombuffer(delta, f"i{itemsize}", offset=size)


def num_changed(delta: bytes | None, numel: int, itemsize: int) -> int:
    """The number of changed numbers among so many, by their delta."""
    return 0 if delta is None else (len(delta) - -(-numel // 8)) // itemsize


def bits_of(numbers: Tensor) -> np.ndarray:
    """The bits of numbers on the CPU as signed integers, which share the tensor's memory."""
    return integers_of(numbers).numpy()


def integers_of(numbers: Tensor) -> Tensor:
    """The bits of numbers as signed integers, [n], which share the tensor's memory."""
    return numbers.detach().view(-1).view(_INTEGERS[numbers.element_size()])


def _pack(changed: Tensor) -> Tensor:
    """A bit for each of [n] bool: [n / 8] uint8, the first of eight as the lowest bit."""
    padded = torch.nn.functional.pad(changed.view(torch.uint8), (0, -len(changed) % 8))
    return ((padded.view(torch.int64) * _EIGHT_BITS >> 56) & 255).to(torch.uint8)
