"""Linear layers with a frozen quantized weight, as base of adapters (QLoRA; Dettmers et al., arXiv:2305.14314).

The weight is dequantized in the forward and again in the backward; only codes and scales are kept in between.

Shape letters: O outputs, I inputs, B values of a block, t tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.quantized.formats import FORMATS
from automodel_rl.quantized.weight import QuantizedWeight, values_of


class QuantizedLinear(nn.Linear):
    """A linear layer with its frozen weight in `quantized`."""

    quantized: QuantizedWeight

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The values of this rank's rows, dequantized at every access."""
        return self.quantized.values()

    def product(
        self, hidden: Tensor, bias: Tensor | None = None, own: Callable[[Tensor], Tensor] = local_tensor
    ) -> Tensor:
        """Multiplies tokens [..., I] by this rank's part of the weight, adding its bias [O]."""
        held = self.quantized
        codes, scale_bytes = own(held.codes), own(held.scale_bytes)
        output = quantized_product(
            hidden, codes, scale_bytes, held.quantized_format.format, held.rounded_to, transposed=True
        )
        return output if bias is None else output + bias

    def forward(self, hidden: Tensor) -> Tensor:
        return self.product(hidden, self.bias)


# A custom operator: the compiler would otherwise keep the plain weight for the backward. Its gradient is registered,
# because torch 2.11 keeps the results of autograd functions in a graph that recomputes.
@torch.library.custom_op("automodel_rl::quantized_product", mutates_args=())
def quantized_product(
    tokens: Tensor, codes: Tensor, scale_bytes: Tensor, name: str, rounded_to: torch.dtype, transposed: bool
) -> Tensor:
    """Multiplies tokens by a frozen weight, given by the tensors and format `name` of a `QuantizedWeight`: [..., O] to
    [..., I] or, if `transposed`, by its transpose, [..., I] to [..., O]."""
    weight = values_of(codes, scale_bytes, name, rounded_to).to(tokens.dtype)
    return tokens @ (weight.mT if transposed else weight)


@quantized_product.register_fake
def _(
    tokens: Tensor, codes: Tensor, scale_bytes: Tensor, name: str, rounded_to: torch.dtype, transposed: bool
) -> Tensor:
    outputs, width = codes.shape
    return tokens.new_empty(*tokens.shape[:-1], outputs if transposed else width * FORMATS[name].per_byte)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scale_bytes, ctx.name, ctx.rounded_to, ctx.transposed = inputs
    ctx.save_for_backward(codes, scale_bytes)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    of_tokens = quantized_product(gradient, *ctx.saved_tensors, ctx.name, ctx.rounded_to, not ctx.transposed)
    return of_tokens, None, None, None, None, None


quantized_product.register_autograd(_backward, setup_context=_keep)
