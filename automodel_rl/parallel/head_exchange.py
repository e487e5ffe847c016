"""Exchanges a rank's tokens of all heads for all ranks' tokens of some heads, and back (Ulysses; Jacobs et al.,
arXiv:2309.14509)."""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.parallel.collectives import AllToAll


def to_heads(parts: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Exchanges [t, heads, d] of this rank's tokens for [size * t, heads / size, d] of all ranks' tokens, rank 0's
    first. The dtype of the tensors together is the widest."""
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


def from_heads(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges [size * t, heads / size, d] for [t, heads, d]."""
    size = group.size()
    sent = [len(whole) // size] * size
    came = AllToAll.apply(whole.flatten(1), sent, sent, 0, group).unflatten(0, (size, -1)).transpose(0, 1)
    return came.unflatten(2, whole.shape[1:]).flatten(1, 2)
