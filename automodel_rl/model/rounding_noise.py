"""Noise the size of rounding errors at the input of every decoder layer, to measure how far such errors propagate.

Correct implementations of a model round in different places; their log-probabilities differ more the more layers
there are. In a 70B-shaped model with random weights, bfloat16 differs from float32 by 0.34 (root mean square), and
from itself with this noise by 0.37; with a quarter of the layers by 0.16 and 0.14 (benchmarks/speed.md).
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.part_forward import numbered_layers


@contextlib.contextmanager
def rounding_noise(handle: ModelHandle, dtype: torch.dtype) -> Iterator[None]:
    """Perturbs the input of every decoder layer inside the block, elementwise, by as much as rounding to `dtype` can.

    All ranks of the model enter the block. Noise is seeded by layer number, so replicas perturb a tensor identically.
    """
    unit = torch.finfo(dtype).eps / 4
    with contextlib.ExitStack() as hooks:
        for stage in handle.stages:  # encoders have no decoder layers
            for number, layer in numbered_layers(stage.part).items():
                hooks.callback(layer.register_forward_pre_hook(functools.partial(_disturb, unit, number)).remove)
        yield


def _disturb(unit: float, seed: int, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden: Tensor = arguments[0]
    generator = torch.Generator(hidden.device).manual_seed(seed)
    noise = torch.randn(hidden.shape, generator=generator, device=hidden.device, dtype=hidden.dtype)
    return hidden + hidden * noise * unit, *arguments[1:]
