"""Products of experts with frozen quantized stacks of weights, dequantized in the forward and again in the backward.

Shape letters: e experts of this rank, s slots, in and out the sizes of a matrix.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.quantized.formats import FORMATS
from automodel_rl.quantized.weight import QuantizedWeight, values_of

GROUPED_MULTIPLE = 8
"""Multiple of bfloat16 matrix sizes that torch's grouped products require: 16 bytes."""


def grouped_product(inputs: Tensor, weight: Tensor, counts_e: Tensor) -> Tensor:
    """Multiplies each expert's slots by its own matrix of `weight` [e, in, out], [s, in] to [s, out]."""
    if inputs.dtype == torch.bfloat16 and not any(size % GROUPED_MULTIPLE for size in weight.shape[1:]):
        return F.grouped_mm(inputs, weight, offs=counts_e.cumsum(0, dtype=torch.int32))
    stretches = inputs.split(counts_e.tolist())
    return torch.cat([stretch @ matrix for stretch, matrix in zip(stretches, weight, strict=True)])


def frozen_grouped_product(inputs: Tensor, held: QuantizedWeight, is_transposed: bool, counts_e: Tensor) -> Tensor:
    """`grouped_product` with a quantized stack, [e, out, in], or [e, in, out] if it is transposed."""
    codes, scale_bytes = local_tensor(held.codes), local_tensor(held.scale_bytes)
    transposed = is_transposed == held.quantized_format.is_transposed
    return quantized_grouped_product(
        inputs, codes, scale_bytes, counts_e, held.quantized_format.format, held.rounded_to, transposed
    )


# A custom operator with a registered gradient, as in linear.py.
@torch.library.custom_op("automodel_rl::quantized_grouped_product", mutates_args=())
def quantized_grouped_product(
    inputs: Tensor,
    codes: Tensor,
    scale_bytes: Tensor,
    counts_e: Tensor,
    name: str,
    rounded_to: torch.dtype,
    transposed: bool,
) -> Tensor:
    """Multiplies each expert's slots [s, in] by its frozen matrix, given by the tensors and format `name` of a
    `QuantizedWeight`; if `transposed`, by the transpose of the stored one."""
    weight = values_of(codes, scale_bytes, name, rounded_to).to(inputs.dtype)
    return grouped_product(inputs, weight.mT if transposed else weight, counts_e)


@quantized_grouped_product.register_fake
def _(
    inputs: Tensor,
    codes: Tensor,
    scale_bytes: Tensor,
    counts_e: Tensor,
    name: str,
    rounded_to: torch.dtype,
    transposed: bool,
) -> Tensor:
    rows, width = codes.shape[1:]
    return inputs.new_empty(len(inputs), rows if transposed else width * FORMATS[name].per_byte)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scale_bytes, counts_e, ctx.name, ctx.rounded_to, ctx.transposed = inputs
    ctx.save_for_backward(codes, scale_bytes, counts_e)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
    how = ctx.name, ctx.rounded_to, not ctx.transposed
    return (
        quantized_grouped_product(gradient.contiguous(), *ctx.saved_tensors, *how),
        None,
        None,
        None,
        None,
        None,
        None,
    )


quantized_grouped_product.register_autograd(_backward, setup_context=_keep)
