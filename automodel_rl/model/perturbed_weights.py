"""A temporary, visible change of every trained weight that is undone bit for bit."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import local_tensor

STRIDE = 7
"""Every seventh value is changed. Weight sizes are seldom multiples of 7, so these are spread over all rows and
columns."""

FACTOR = 0.5
"""Factor of the changed values: a power of two, which can be undone exactly."""

IN_PLACE_OF_ZERO = 0.01
"""Replacement for zeros, such as those of new adapters."""


@contextlib.contextmanager
@torch.no_grad()
def perturbed_weights(handle: ModelHandle) -> Iterator[None]:
    """Changes every trained weight inside the block, by about a fifth of its norm, and restores it bit for bit
    afterwards.

    All ranks of the model enter the block. Replicas stay equal.
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
    """Returns views of the values to change in this rank's shards."""
    handle.wait_for_readers()
    trained = (parameter for part in handle.parts for parameter in part.parameters() if parameter.requires_grad)
    return [local_tensor(parameter).detach().view(-1)[::STRIDE] for parameter in trained]
