"""Linear layers whose frozen weight stays in nf4, as a base of adapters (QLoRA; Dettmers et al., arXiv:2305.14314).

The weight is made plain in the forward, and again in the backward: only codes and scales are kept in between.

Shape letters: O outputs, I inputs, B values of a block, t tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.few_bits.weight import NF4Weight, values_of


class NF4Linear(nn.Linear):
    """A linear layer with its frozen weight in `few_bits`."""

    few_bits: NF4Weight

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The values of this rank's rows, made plain anew at every call."""
        return self.few_bits.values()

    def forward(self, hidden: Tensor) -> Tensor:
        held = self.few_bits
        output = _FrozenProduct.apply(hidden, held.codes, held.scale_bytes, held.rounded_to)
        return output if self.bias is None else output + self.bias


class _FrozenProduct(torch.autograd.Function):
    """Tokens times a frozen weight, [..., I] to [..., O].

    Args (of `apply`):
        hidden: [..., I].
        codes, scale_bytes, rounded_to: those of an `NF4Weight`, whole.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, codes: Tensor, scale_bytes: Tensor, rounded_to: torch.dtype) -> Tensor:
        ctx.save_for_backward(codes, scale_bytes)
        ctx.rounded_to = rounded_to
        return nf4_product(hidden, codes, scale_bytes, rounded_to, True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return nf4_product(gradients[0], *ctx.saved_tensors, ctx.rounded_to, False), None, None, None


# An operator: a compiler that saw the plain weight would keep it for the backward.
@torch.library.custom_op("automodel_rl::nf4_product", mutates_args=())
def nf4_product(tokens: Tensor, codes: Tensor, scale_bytes: Tensor, rounded_to: torch.dtype, turned: bool) -> Tensor:
    """Tokens times the weight of codes and scales, [..., O] to [..., I]; or `turned`, times its transpose."""
    weight = values_of(codes, scale_bytes, rounded_to).to(tokens.dtype)
    return tokens @ (weight.mT if turned else weight)


@nf4_product.register_fake
def _(tokens: Tensor, codes: Tensor, scale_bytes: Tensor, rounded_to: torch.dtype, turned: bool) -> Tensor:
    outputs, half = codes.shape
    return tokens.new_empty(*tokens.shape[:-1], outputs if turned else 2 * half)
