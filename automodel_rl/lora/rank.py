"""Adapters of a smaller rank, stored in adapters of a larger rank.

They have some of the rows of A and the same columns of B. The rest is filled with zeros. Neither gets a gradient, for
each is multiplied by the other. So an optimizer leaves them at 0, and the adapter computes and trains as one of its own
rank.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from automodel_rl.lora.experts import adapted_stacks, adapter_of
from automodel_rl.lora.layers import adapted_layers
from automodel_rl.lora.magnitude import is_magnitude
from automodel_rl.parallel.sharding import local_box

ATTENTION = re.compile(r"\.(self_attn|attn|attention|linear_attn)\.")


def is_attention(name: str) -> bool:
    """Whether an adapter belongs to an attention layer, by its full name."""
    return ATTENTION.search(name) is not None


def set_scale(parts: Iterable[Any], scale: float) -> None:
    """Sets the factor of the output of every adapter of a model's parts. It is a tensor: for a number, compiled layers
    would need graphs for each that comes."""
    for part in parts:
        for linear in adapted_layers(part):
            linear.lora_scale = _beside(linear.lora_A.weight, scale)
        for weight, (experts, name) in adapted_stacks(part):
            adapter_of(experts, name).scale = _beside(weight, scale)


def _beside(weight: Tensor, number: float) -> Tensor:
    """A number as a tensor without dims on a weight's device, in fp32 or wider."""
    return torch.tensor(number, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)


def cut_to_rank(name: str, tensor: Tensor, rows: slice) -> Tensor:
    """An adapter or its optimizer moment, cut to the rank of its own training.

    Args:
        name: the adapter's name.
        tensor: A [..., largest rank, inputs] or B [..., outputs, largest rank], whole.
        rows: its own rows of A, and columns of B.
    """
    return tensor.narrow(_rank_dim(name), rows.start, rows.stop - rows.start)


def own_part(name: str, parameter: Tensor, shard: Tensor, rows: slice) -> Tensor:
    """A copy of this rank's shard of an adapter, or of its gradient, with zeros in place of what others have.

    Args:
        name: the adapter's name.
        parameter: the adapter, whose shard has the same place.
        shard: the shard.
        rows: the rows of A, and columns of B, to keep.
    """
    dim = _rank_dim(name) % shard.ndim
    held = local_box(parameter)[dim]
    start = min(max(rows.start - held.start, 0), shard.shape[dim])
    stop = min(max(rows.stop - held.start, start), shard.shape[dim])
    kept = torch.zeros_like(shard)
    kept.narrow(dim, start, stop - start).copy_(shard.narrow(dim, start, stop - start))
    return kept


def fill_up_to_rank(name: str, tensor: Tensor, shape: tuple[int, ...], first: int = 0) -> Tensor:
    """An adapter or its optimizer moment, filled up with zeros to the rank of all trainings.

    Args:
        name: the adapter's name.
        tensor: A [..., rank, inputs] or B [..., outputs, rank], whole.
        shape: the shape with the largest rank.
        first: the first of its rows of A, and columns of B.

    Raises:
        ValueError: the tensor has another size than this shape in a dim that is not the rank's, or a larger rank.
    """
    dim = _rank_dim(name) % len(shape)
    sizes = [*shape[:dim], tensor.shape[dim], *shape[dim + 1 :]]
    if [*tensor.shape] != sizes or first + tensor.shape[dim] > shape[dim]:
        raise ValueError(f"{name} has the shape {[*tensor.shape]}, for {[*shape]}")
    whole = tensor.new_zeros(shape)
    whole.narrow(dim, first, tensor.shape[dim]).copy_(tensor)
    return whole


def _rank_dim(name: str) -> int:
    if is_magnitude(name):
        raise ValueError(f"{name} has no dim of the rank")
    return -2 if ".lora_A." in name else -1
