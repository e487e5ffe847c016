"""Adapters of a smaller rank in the places of a larger one.

The rest is filled with zeros: of A the rows beyond the rank, of B the columns. Neither gets a gradient, for each is
multiplied by the other. So an optimizer leaves them at 0, and the adapter computes and trains as one of its own rank.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from automodel_rl.lora.experts import adapted_stacks, adapter_of
from automodel_rl.lora.layers import adapted_weights

ATTENTION = re.compile(r"\.(self_attn|attn|attention|linear_attn)\.")


def is_attention(name: str) -> bool:
    """Whether an adapter belongs to an attention layer, by its full name."""
    return ATTENTION.search(name) is not None


def set_scale(parts: Iterable[Any], scale: float) -> None:
    """Sets the factor of the output of every adapter of a model's parts."""
    for part in parts:
        for _, linear in adapted_weights(part):
            linear.lora_scale = scale
        for _, (experts, name) in adapted_stacks(part):
            adapter_of(experts, name).scale = scale


def cut_to_rank(name: str, tensor: Tensor, rank: int) -> Tensor:
    """An adapter, or a moment of one, without what is beyond its rank.

    Args:
        name: the adapter's name.
        tensor: A [..., largest rank, inputs] or B [..., outputs, largest rank], whole.
        rank: its own rank.
    """
    return tensor.narrow(_rank_dim(name), 0, rank)


def fill_up_to_rank(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An adapter, or a moment of one, with zeros beyond its rank.

    Args:
        name: the adapter's name.
        tensor: A [..., rank, inputs] or B [..., outputs, rank], whole.
        shape: the shape with the largest rank.

    Raises:
        ValueError: the tensor has another size than this shape in a dim that is not the rank's, or a larger rank.
    """
    dim = _rank_dim(name) % len(shape)
    sizes = [*shape[:dim], tensor.shape[dim], *shape[dim + 1 :]]
    if [*tensor.shape] != sizes or tensor.shape[dim] > shape[dim]:
        raise ValueError(f"{name} has the shape {[*tensor.shape]}, for {[*shape]}")
    whole = tensor.new_zeros(shape)
    whole.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return whole


def _rank_dim(name: str) -> int:
    return -2 if ".lora_A." in name else -1
