"""Differentiable collectives for use inside a model's forward.

If all ranks compute the same from what they received, the backward keeps the rank's own part of the gradient. If each
computes something different, the backward sums.
"""

import functools
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.compat import collective_operators as operators

Group = dist.ProcessGroup
Backward = Literal["slice", "sum"]


class AllGatherCP(torch.autograd.Function):
    """Gathers all ranks' tokens, rank 0's first: [t, ...] to [size * t, ...]. Also used for sequence parallelism; the
    name is the reference design's.

    Args (of `apply`):
        tensor: this rank's tokens.
        group: the ranks that share a microbatch or, under sequence parallelism, split a layer.
        backward: "slice" if every rank computes the same from the result (a loss): each keeps its own rows of the
            gradient, and parameter gradients are summed over the group. "sum" if every rank uses the result
            differently (attention's keys and values, tokens of split layers): the ranks' gradients are added and cut.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, backward: Backward) -> Tensor:
        ctx.group, ctx.backward_kind = group, backward
        return all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.backward_kind == "slice":
            return _own_rows(gradients[0], ctx.group), None, None
        return reduce_scatter(gradients[0], ctx.group), None, None


class CopyToTP(torch.autograd.Function):
    """Entry of a block with split weights: identity; the backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0], ctx.group), None


class SumFromTP(torch.autograd.Function):
    """Exit of a block with split weights: sums the ranks' parts; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class ScatterSum(torch.autograd.Function):
    """Exit of a block under sequence parallelism: sums the ranks' parts and cuts, [1, t, H] to [1, t / tp, H].

    The result is not a view: compiled layers would need a graph per kind of view.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return operators.reduce_scatter(tensor, 1, group.size(), group.group_name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradients[0].squeeze(0), ctx.group).unsqueeze(0), None


class AllToAll(torch.autograd.Function):
    """Sends rows to the ranks that need them; gradients return the same way.

    Args (of `apply`):
        tensor: [sum of `sent` + `added`, ...], rows for rank 0 first.
        sent, received: number of rows to and from every rank.
        added: number of rows at the end that are not sent. They become zeros, as do their gradients.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sent: list[int], received: list[int], added: int, group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.added, ctx.group = sent, received, added, group
        return all_to_all(tensor, sent, received, group, added)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return all_to_all(gradients[0], ctx.received, ctx.sent, ctx.group, ctx.added), None, None, None, None


def all_to_all(tensor: Tensor, sent: list[int], received: list[int], group: Group, added: int = 0) -> Tensor:
    """Exchanges rows as `AllToAll`, without gradients."""
    return operators.all_to_all(tensor, sent, received, added, group.group_name)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """Concatenates the ranks' tensors [n, ...], rank 0's first, to [size * n, ...]."""
    return operators.all_gather(tensor, group.size(), group.group_name)


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """Returns this rank's part [n, ...] of the sum over ranks of [size * n, ...]."""
    return operators.reduce_scatter(tensor, 0, group.size(), group.group_name)


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """Returns the sum over ranks. Not differentiable."""
    return operators.all_reduce(tensor, group.group_name)


def _own_rows(tensor: Tensor, group: Group) -> Tensor:
    return tensor.chunk(group.size())[group.rank()].contiguous()


def to_heads(parts: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
    """Exchanges [t, heads, d] of this rank's tokens for [size * t, heads / size, d] of all ranks' tokens, rank 0's
    first (Ulysses; Jacobs et al., arXiv:2309.14509). Dtypes are kept; the exchange uses the widest."""
    size, num_tokens = group.size(), len(parts[0])
    widest = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    cut = [part.to(widest).unflatten(1, (size, -1)).transpose(0, 1).flatten(2) for part in parts]  # [size, t, ...]
    sent = [num_tokens] * size
    came = AllToAll.apply(torch.cat(cut, dim=-1).flatten(0, 1), sent, sent, 0, group)
    pieces = came.split([piece.shape[-1] for piece in cut], dim=-1)
    return tuple(
        piece.unflatten(1, (part.shape[1] // size, -1)).to(part.dtype)
        for piece, part in zip(pieces, parts, strict=True)
    )


def from_heads(whole: Tensor, group: Group) -> Tensor:
    """Exchanges [size * t, heads / size, d] for [t, heads, d]."""
    size = group.size()
    sent = [len(whole) // size] * size
    came = AllToAll.apply(whole.flatten(1), sent, sent, 0, group).unflatten(0, (size, -1)).transpose(0, 1)
    return came.unflatten(2, whole.shape[1:]).flatten(1, 2)
