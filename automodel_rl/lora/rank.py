"""Adapters of a smaller rank, stored in adapters of a larger rank.

They use some rows of A and the same columns of B. The rest is 0, and gets no gradient, because A's and B's zeros
multiply each other's. So optimizers leave it at 0, and the adapter computes and trains as one of its own rank.
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
    """Returns whether an adapter, by its full name, belongs to an attention layer."""
    return ATTENTION.search(name) is not None


def set_scale(parts: Iterable[Any], scale: float) -> None:
    """Sets the output factor of every adapter in a model's parts. It is a tensor: compiled layers would need graphs
    for each number."""
    for part in parts:
        for linear in adapted_layers(part):
            linear.lora_scale = _beside(linear.lora_A.weight, scale)
        for weight, (experts, name) in adapted_stacks(part):
            adapter_of(experts, name).scale = _beside(weight, scale)


def _beside(weight: Tensor, number: float) -> Tensor:
    """Returns a number as a scalar tensor on a weight's device, in fp32 or wider."""
    return torch.tensor(number, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)


def cut_to_rank(name: str, tensor: Tensor, rows: slice) -> Tensor:
    """Cuts a whole adapter or optimizer moment to the rank of its own training.

    Args:
        tensor: A [..., largest rank, inputs] or B [..., outputs, largest rank].
        rows: its own rows of A, or columns of B.
    """
    return tensor.narrow(_rank_dim(name), rows.start, rows.stop - rows.start)


def own_part(name: str, parameter: Tensor, shard: Tensor, rows: slice) -> Tensor:
    """Copies this rank's shard of an adapter or of its gradient, with zeros outside the given `rows` of A or columns
    of B. `parameter` is the adapter, sharded like `shard`."""
    dim = _rank_dim(name) % shard.ndim
    held = local_box(parameter)[dim]
    start = min(max(rows.start - held.start, 0), shard.shape[dim])
    stop = min(max(rows.stop - held.start, start), shard.shape[dim])
    kept = torch.zeros_like(shard)
    kept.narrow(dim, start, stop - start).copy_(shard.narrow(dim, start, stop - start))
    return kept


def fill_up_to_rank(name: str, tensor: Tensor, shape: tuple[int, ...], first: int = 0) -> Tensor:
    """Zero-pads a whole adapter or optimizer moment to the largest rank.

    Args:
        tensor: A [..., rank, inputs] or B [..., outputs, rank].
        shape: the shape with the largest rank.
        first: index of its first row of A, or column of B.

    Raises:
        ValueError: the tensor does not fit into this shape.
    """
    dim = _rank_dim(name) % len(shape)
    sizes = [*shape[:dim], tensor.shape[dim], *shape[dim + 1 :]]
    if [*tensor.shape] != sizes or first + tensor.shape[dim] > shape[dim]:
        raise ValueError(f"{name} has shape {[*tensor.shape]}, which does not fit {[*shape]}")
    whole = tensor.new_zeros(shape)
    whole.narrow(dim, first, tensor.shape[dim]).copy_(tensor)
    return whole


def _rank_dim(name: str) -> int:
    if is_magnitude(name):
        raise ValueError(f"{name} has no rank dim")
    return -2 if ".lora_A." in name else -1
