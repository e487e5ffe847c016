"""Compiled decoder layers: equal layers share one graph with gradients and one without, whatever microbatches hold.

A layer is compiled whole, attention included where its backend allows it. Numbers of tokens and of sequences are
symbols of the graph, so no microbatch needs a graph of its own.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from automodel_rl.compat.compilation import compile_for_any_size
from automodel_rl.support.capabilities import goes_with_all
from automodel_rl.support.combination import Combination
from automodel_rl.support.features import COMPILED


def are_compiled(asked: Combination, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers are compiled: as asked or, with `auto`, where it pays and works.

    Args:
        asked: the combination of model, layout and settings, which the table has accepted.
        device, dtype: device and dtype of the computation.
    """
    if asked.memory.compile != "auto":
        return asked.memory.compile
    return device.type == "cuda" and dtype == torch.bfloat16 and goes_with_all(COMPILED, asked)


def compile_layers(layers: Iterable[Any]) -> None:
    """Compiles the forwards of layers in place, each at its first call."""
    for layer in layers:
        forward = compile_for_any_size(layer.forward)
        trained = any(parameter.requires_grad for parameter in layer.parameters())
        layer.forward = _with_gradient(forward) if trained else forward


def _with_gradient(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer's forward whose input always has a gradient.

    The input of the first layer has none if the embedding is frozen, as with adapters. It would need graphs of its own,
    which cost more time than its gradient.
    """

    @functools.wraps(forward)
    def call(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        return forward(hidden, *args, **kwargs)

    return call
