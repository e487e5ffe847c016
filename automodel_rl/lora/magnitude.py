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


def magnitude_of(layer: str) -> str:
    """The name of the parameter, by the layer's."""
    return f"{layer}.{MAGNITUDE}.weight"


def is_magnitude(name: str) -> bool:
    """Whether a parameter is the trained lengths of rows of an adapted layer."""
    return name.endswith(magnitude_of(""))


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
    magnitude, weight = local_tensor(linear.lora_magnitude_vector.weight), local_tensor(linear.weight).to(base.dtype)
    down, up = local_tensor(linear.lora_A.weight), local_tensor(linear.lora_B.weight)
    with torch.no_grad():
        lengths = row_lengths(weight, down, up, linear.lora_scale)
    factor = magnitude.to(lengths.dtype) / lengths
    # Rows are scaled in fp32: an error of a factor is the same for all tokens.
    output = factor * (base + change).to(factor.dtype)
    if linear.bias is not None:
        output = output + (1 - factor) * local_tensor(linear.bias)
    return output.to(base.dtype)


def row_lengths(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """The lengths of the rows of a weight with its adapter, fp32 or wider [O], and above 0.

    No weight is made: |W + s B A|^2 = |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B, by rows.

    Args:
        weight: [O, I].
        down: `lora_A` [r, I].
        up: `lora_B` [O, r].
        scale: the factor of the adapter's output.
    """
    wide = torch.promote_types(torch.promote_types(weight.dtype, up.dtype), torch.float32)
    own = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    crossed = (weight @ down.to(weight.dtype).T).to(wide)
    up, down = up.to(wide), down.to(wide)
    squared = own + 2 * scale * (crossed * up).sum(1) + scale**2 * ((up @ (down @ down.T)) * up).sum(1)
    return squared.clamp(min=torch.finfo(wide).tiny).sqrt()  # a row of zeros stays one
