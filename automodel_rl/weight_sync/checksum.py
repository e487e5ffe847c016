"""A checksum of a tensor's bits. It can be taken of stretches of the tensor, in any order."""

import torch
from torch import Tensor

BLOCK = 2**22
"""Elements that are summed at once; they are widened to 64 bits."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(elements: Tensor, start: int = 0) -> Tensor:
    """The sum over i of bits[i] * (2 (start + i) + 1), modulo 2 ** 64.

    Every odd factor has an inverse, so a change of a single element changes the sum, and so does swapping two elements
    that differ.

    Args:
        elements: a stretch of a flattened tensor, contiguous.
        start: place of the stretch in the tensor. The checksums of all stretches add up to that of the tensor.

    Returns:
        An int64 scalar on the device of the elements.
    """
    bits = elements.detach().view(-1).view(_INTEGERS[elements.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=elements.device)
    for begin in range(0, len(bits), BLOCK):
        block = bits[begin : begin + BLOCK].to(torch.int64)
        first = 2 * (start + begin) + 1
        factors = torch.arange(first, first + 2 * len(block), 2, device=elements.device)
        total += (block * factors).sum()
    return total
