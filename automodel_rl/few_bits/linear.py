"""Linear layers with a frozen quantized weight, as base of adapters (QLoRA; Dettmers et al., arXiv:2305.14314).

The weight is dequantized in the forward and again in the backward; only codes and scales are kept in between.

Shape letters: O outputs, I inputs, B values of a block, t tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.few_bits.formats import FORMATS
from automodel_rl.few_bits.weight import FewBitsWeight, values_of
from automodel_rl.parallel.sharding import local_tensor


class FewBitsLinear(nn.Linear):
    """A linear layer with its frozen weight in `few_bits`."""

    few_bits: FewBitsWeight

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The values of this rank's rows, dequantized at every access."""
        return self.few_bits.values()

    def product(
        self, hidden: Tensor, bias: Tensor | None = None, own: Callable[[Tensor], Tensor] = local_tensor
    ) -> Tensor:
        """Multiplies tokens [..., I] by this rank's part of the weight, adding its bias [O]."""
        held = self.few_bits
        codes, scale_bytes = own(held.codes), own(held.scale_bytes)
        output = few_bits_product(hidden, codes, scale_bytes, held.kept.format, held.rounded_to, turned=True)
        return output if bias is None else output + bias

    def forward(self, hidden: Tensor) -> Tensor:
        return self.product(hidden, self.bias)


# A custom operator: the compiler would otherwise keep the plain weight for the backward. Its gradient is registered,
# because torch 2.11 keeps the results of autograd functions in a graph that recomputes.
@torch.library.custom_op("automodel_rl::few_bits_product", mutates_args=())
def few_bits_product(
    tokens: Tensor, codes: Tensor, scale_bytes: Tensor, name: str, rounded_to: torch.dtype, turned: bool
) -> Tensor:
    """Multiplies tokens by a frozen weight, given by the tensors and format `name` of a `FewBitsWeight`: [..., O] to
    [..., I] or, if `turned`, by its transpose, [..., I] to [..., O]."""
    weight = values_of(codes, scale_bytes, name, rounded_to).to(tokens.dtype)
    return tokens @ (weight.mT if turned else weight)


@few_bits_product.register_fake
def _(tokens: Tensor, codes: Tensor, scale_bytes: Tensor, name: str, rounded_to: torch.dtype, turned: bool) -> Tensor:
    outputs, width = codes.shape
    return tokens.new_empty(*tokens.shape[:-1], outputs if turned else width * FORMATS[name].per_byte)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scale_bytes, ctx.name, ctx.rounded_to, ctx.turned = inputs
    ctx.save_for_backward(codes, scale_bytes)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    of_tokens = few_bits_product(gradient, *ctx.saved_tensors, ctx.name, ctx.rounded_to, not ctx.turned)
    return of_tokens, None, None, None, None, None


few_bits_product.register_autograd(_backward, setup_context=_keep)
