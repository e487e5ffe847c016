"""Compiled decoder layers. Identical layers share one graph with gradients and one without.

Layers are compiled whole, with attention where its backend allows it. Token and sequence counts are symbolic, so new
microbatch sizes do not recompile.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from automodel_rl.compat.compilation import compile_for_any_size
from automodel_rl.support.capabilities import is_compatible
from automodel_rl.support.combination import Combination
from automodel_rl.support.features import COMPILED


def are_compiled(combination: Combination, device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether to compile layers: as requested or, for `auto`, where compilation works and pays off. The
    support table has accepted `combination`."""
    if combination.memory.compile != "auto":
        return combination.memory.compile
    return device.type == "cuda" and dtype == torch.bfloat16 and is_compatible(COMPILED, combination)


def compile_layers(layers: Iterable[Any]) -> None:
    """Compiles the forwards of layers in place, each on its first call."""
    for layer in layers:
        forward = compile_for_any_size(layer.forward)
        trained = any(parameter.requires_grad for parameter in layer.parameters())
        layer.forward = _with_gradient(forward) if trained else forward


def _with_gradient(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes a layer's input always require a gradient. Without one, as after a frozen embedding, the first layer
    would need graphs of its own, which cost more time than the gradient."""

    @functools.wraps(forward)
    def call(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        return forward(hidden, *args, **kwargs)

    return call
