"""Tiled MLPs: forward and backward process a few tokens at a time (ALST, arXiv:2506.13996).

An MLP's intermediate values are several times as wide as its ends. With tiles they exist for one tile's tokens only,
and are recomputed in the backward. A recomputed layer then need not run its MLP, unless something after it is kept.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.compat.compilation import compile_for_any_size, outside_of_graphs

MLP_NAMES = ("mlp", "feed_forward")
"""Names of the MLP in layers of dense models."""


def tile_mlps(layers: Iterable[nn.Module], num_tokens: int, compiled: bool = False) -> None:
    """Makes the MLPs of dense layers compute `num_tokens` tokens at a time. If layers are compiled, a tile has a
    graph of its own, between those of its layer."""
    for layer in layers:
        for mlp in mlps_of(layer):
            forward = compile_for_any_size(mlp.forward) if compiled else mlp.forward
            in_tiles = functools.partial(_in_tiles, mlp, forward, num_tokens)
            mlp.forward = outside_of_graphs(in_tiles) if compiled else in_tiles


def mlps_of(layer: nn.Module) -> Iterator[nn.Module]:
    return (module for name, module in layer.named_modules() if name.rpartition(".")[2] in MLP_NAMES)


def _in_tiles(mlp: nn.Module, forward: Callable[[Tensor], Tensor], num_tokens: int, hidden: Tensor) -> Tensor:
    if hidden.shape[1] <= num_tokens:
        return forward(hidden)
    if not torch.is_grad_enabled():
        return _forward(forward, hidden, num_tokens)
    # The first layer's input requires no gradient if everything before it is frozen.
    kept = _Kept.apply(hidden if hidden.requires_grad else hidden.detach().requires_grad_())
    return _Tiles.apply(kept.grad_fn, forward, num_tokens, mlp, kept, *_trained(mlp))


def _trained(mlp: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in mlp.parameters() if parameter.requires_grad]


def _forward(forward: Callable[[Tensor], Tensor], hidden: Tensor, num_tokens: int) -> Tensor:
    result: Tensor | None = None
    for span in _spans(hidden, num_tokens):
        part = forward(hidden[:, span])
        if result is None:
            result = part.new_empty(*hidden.shape[:2], part.shape[2])
        result[:, span] = part
    assert result is not None
    return result


def _spans(hidden: Tensor, num_tokens: int) -> list[slice]:
    return [slice(start, start + num_tokens) for start in range(0, hidden.shape[1], num_tokens)]


class _Kept(torch.autograd.Function):
    """Saves the input of a tiled MLP, the only tensor kept of it.

    It is saved before the MLP runs, not by `_Tiles`: torch's recomputation stops once the last saved tensor exists.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Tiles(torch.autograd.Function):
    """A tiled MLP. Weight gradients are summed over tiles in fp32 or wider, as within one matrix product."""

    @staticmethod
    def forward(
        ctx: Any,
        input_node: Any,
        forward: Callable[[Tensor], Tensor],
        num_tokens: int,
        mlp: nn.Module,
        hidden: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.input_node, ctx.mlp_forward, ctx.num_tokens, ctx.mlp = input_node, forward, num_tokens, mlp
        return _forward(forward, hidden, num_tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,), weights = ctx.input_node.saved_tensors, _trained(ctx.mlp)
        of_hidden = torch.empty_like(hidden)
        sums = [torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) for weight in weights]
        for span in _spans(hidden, ctx.num_tokens):
            tile = hidden[:, span].detach().requires_grad_()
            with torch.enable_grad():
                result = ctx.mlp_forward(tile)
            of_tile, *found = torch.autograd.grad(result, [tile, *weights], gradient[:, span])
            of_hidden[:, span] = of_tile
            add_up(sums, found)
        of_weights = (total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True))
        return None, None, None, None, of_hidden, *of_weights


def add_up(sums: list[Tensor], of_tile: list[Tensor]) -> None:
    """Adds a tile's weight gradients to the sums in place."""
    for total, gradient in zip(sums, of_tile, strict=True):
        total += gradient
