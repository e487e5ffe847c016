"""Changes every trained weight for a while, visibly, and takes the change back to the last bit."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import local_tensor

STRIDE = 7
"""One of so many numbers of a weight is changed. Sizes of weights are seldom multiples of it, so that the changed
numbers lie in all rows and columns."""

FACTOR = 0.5
"""Numbers are multiplied by a power of two, which can be undone exactly."""

IN_PLACE_OF_ZERO = 0.01
"""Zeros, such as those of new adapters, become this number."""


@contextlib.contextmanager
@torch.no_grad()
def changed_weights(handle: ModelHandle) -> Iterator[None]:
    """Every trained weight differs in this block from itself by about a fifth, measured by its norm. After the block
    every weight is as before, bit for bit. Copies of a weight on several ranks stay equal.

    Args:
        handle: the model. All its ranks enter the block.
    """
    numbers_of = _changed(handle)
    zeros = [(numbers == 0).nonzero()[:, 0] for numbers in numbers_of]
    for numbers, places in zip(numbers_of, zeros, strict=True):
        numbers.mul_(FACTOR)
        numbers[places] = IN_PLACE_OF_ZERO
    try:
        yield
    finally:
        for numbers, places in zip(_changed(handle), zeros, strict=True):
            numbers.div_(FACTOR)
            numbers[places] = 0


def _changed(handle: ModelHandle) -> list[Tensor]:
    """This rank's numbers of every trained weight that are changed, as views."""
    handle.before_change()
    trained = (parameter for part in handle.parts for parameter in part.parameters() if parameter.requires_grad)
    return [local_tensor(parameter).detach().view(-1)[::STRIDE] for parameter in trained]
