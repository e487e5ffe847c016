"""Adapters that train the length of each row of a weight by itself (DoRA; Liu et al., arXiv:2402.09353, eq. 5).

A layer computes m / |W + s B A| (W + s B A) x + b, with the length of each row of outputs in |.|. Gradients do not flow
through the length, as in section 4.3.

Shape letters: O outputs, I inputs, r rank.
"""

from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.parallel.sharding import local_tensor

MAGNITUDE = "lora_magnitude_vector"
"""The name that PEFT has for it."""


class Magnitude(nn.Module):
    """The trained lengths of the rows of a layer's weight.

    Args:
        num_rows: number of rows.
        options: dtype and device.
    """

    def __init__(self, num_rows: int, **options: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, **options))


def has_magnitude(linear: Any) -> bool:
    """Whether an adapted layer trains the lengths of its rows."""
    return linear.lora_magnitude_vector is not None


def with_magnitude(linear: Any, base: Tensor, change: Tensor) -> Tensor:
    """A layer's output with its rows at their trained lengths.

    Args:
        linear: the layer.
        base: what its own weight and bias give, [..., O].
        change: what its adapter adds, [..., O].
    """
    magnitude = local_tensor(linear.lora_magnitude_vector.weight)
    down, up = local_tensor(linear.lora_A.weight), local_tensor(linear.lora_B.weight)
    with torch.no_grad():
        before, now = row_lengths(local_tensor(linear.weight), down, up, linear.lora_scale)
    # Both are rounded alike where layers compute in bfloat16, so that an adapter which is new changes nothing.
    factor = (magnitude.to(before.dtype) / before.to(magnitude.dtype) * (before / now)).to(base.dtype)
    output = factor * (base + change)
    return output if linear.bias is None else output + (1 - factor) * local_tensor(linear.bias)


def row_lengths(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The lengths of the rows of a weight, fp32 or wider [O], without and with its adapter.

    Of the second no weight is made: |W + s B A|^2 = |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B, by rows.

    Args:
        weight: [O, I].
        down: `lora_A` [r, I].
        up: `lora_B` [O, r].
        scale: the factor of the adapter's output.
    """
    wide = torch.promote_types(torch.promote_types(weight.dtype, up.dtype), torch.float32)
    before = torch.linalg.vector_norm(weight, dim=1, dtype=wide)
    both = torch.promote_types(weight.dtype, down.dtype)  # a base in few bits has the dtype of its files
    crossed = (weight.to(both) @ down.to(both).T).to(wide)
    up, down = up.to(wide), down.to(wide)
    squared = before.square() + 2 * scale * (crossed * up).sum(1) + scale**2 * ((up @ (down @ down.T)) * up).sum(1)
    return before, squared.clamp(min=0).sqrt()
