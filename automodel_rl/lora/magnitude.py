"""DoRA (Liu et al., arXiv:2402.09353, eq. 5): adapters that also train the magnitude of each row of a weight.

A layer computes m / |W + s B A| (W + s B A) x + b, where |.| is the length of each row of outputs. Gradients do not
flow through the length, as in section 4.3.

Shape letters: O outputs, I inputs, r rank.
"""

from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.parallel.sharding import local_tensor

MAGNITUDE = "lora_magnitude_vector"
"""PEFT's name of the magnitudes."""


def magnitude_of(layer: str) -> str:
    """Returns the name of a layer's magnitude parameter."""
    return f"{layer}.{MAGNITUDE}.weight"


def is_magnitude(name: str) -> bool:
    return name.endswith(magnitude_of(""))


class Magnitude(nn.Module):
    """The trained magnitudes of a weight's rows. `options` are dtype and device."""

    def __init__(self, num_rows: int, **options: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, **options))


def has_magnitude(linear: Any) -> bool:
    return linear.lora_magnitude_vector is not None


def with_magnitude(linear: Any, base: Tensor, change: Tensor) -> Tensor:
    """Returns an adapted layer's output with trained row magnitudes.

    Args:
        base: output of its own weight and bias, [..., O].
        change: output of its adapter, [..., O].
    """
    magnitude, weight = local_tensor(linear.lora_magnitude_vector.weight), local_tensor(linear.weight).to(base.dtype)
    down, up = local_tensor(linear.lora_A.weight), local_tensor(linear.lora_B.weight)
    with torch.no_grad():
        lengths = row_lengths(weight, down, up, linear.lora_scale)
    factor = magnitude.to(lengths.dtype) / lengths
    # Scaled in fp32, because a factor's error affects all tokens alike.
    output = factor * (base + change).to(factor.dtype)
    if linear.bias is not None:
        output = output + (1 - factor) * local_tensor(linear.bias)
    return output.to(base.dtype)


def row_lengths(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Returns the row lengths, fp32 or wider [O], positive, of a weight [O, I] with its adapter A [r, I], B [O, r].

    The merged weight is not materialised: |W + s B A|^2 = |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B, by rows.
    """
    wide = torch.promote_types(torch.promote_types(weight.dtype, up.dtype), torch.float32)
    own = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    crossed = (weight @ down.to(weight.dtype).T).to(wide)
    up, down = up.to(wide), down.to(wide)
    squared = own + 2 * scale * (crossed * up).sum(1) + scale**2 * ((up @ (down @ down.T)) * up).sum(1)
    return squared.clamp(min=torch.finfo(wide).tiny).sqrt()  # a row of zeros stays zero
