"""Linear layers whose frozen weight stays in nf4, as a base of adapters (QLoRA; Dettmers et al., arXiv:2305.14314).

The weight is made plain in the forward, and again in the backward: only codes and scales are kept in between.

Shape letters: O outputs, I inputs, B values of a block, t tokens.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_rl.compat.compilation import compile_for_any_size
from automodel_rl.errors import InputError
from automodel_rl.few_bits.nf4 import BLOCK, dequantize
from automodel_rl.lora.layers import is_adapter
from automodel_rl.parallel.sharding import local_tensor

HOLDER = "few_bits"
"""Name of the submodule that has a layer's codes and scales in place of its weight."""


@functools.cache
def _rounded_at_once() -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """`_rounded` in one kernel: written out, it takes 15 bytes for each value for a moment."""
    return compile_for_any_size(_rounded)


class NF4Weight(nn.Module):
    """A weight [O, I] in nf4. Both parameters are bytes: FSDP casts other parameters of a unit to one dtype.

    Attributes:
        codes: two codes in a byte, uint8 [O, I / 2].
        scale_bytes: the bytes of float32 scales, uint8 [O, 4 I / B].
        rounded_to: the dtype to which values are rounded: that of the weight that was quantized.
    """

    codes: nn.Parameter
    scale_bytes: nn.Parameter

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.rounded_to = torch.float32
        for name, width in (("codes", inputs // 2), ("scale_bytes", inputs // BLOCK * 4)):
            empty = torch.empty(outputs, width, dtype=torch.uint8, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    @property
    def scales(self) -> Tensor:
        """Scales of this rank's rows, float32 [o, I / B], which share memory with their bytes."""
        return local_tensor(self.scale_bytes).view(torch.float32)

    def values(self) -> Tensor:
        """The values of this rank's rows, [o, I] in the dtype to which they are rounded."""
        return _values(local_tensor(self.codes), local_tensor(self.scale_bytes), self.rounded_to)

    def plain(self) -> Tensor:
        """A tensor without storage that is laid out over ranks as the plain weight would be, [O, I]."""
        local = torch.empty(*local_tensor(self.codes).shape[:-1], 2 * self.codes.shape[-1], device="meta")
        if not isinstance(self.codes, DTensor):
            return local
        return DTensor.from_local(
            local,
            self.codes.device_mesh,
            self.codes.placements,
            run_check=False,
            shape=torch.Size((self.codes.shape[0], local.shape[1])),
            stride=(local.shape[1], 1),
        )


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
    weight = _values(codes, scale_bytes, rounded_to).to(tokens.dtype)
    return tokens @ (weight.mT if turned else weight)


@nf4_product.register_fake
def _(tokens: Tensor, codes: Tensor, scale_bytes: Tensor, rounded_to: torch.dtype, turned: bool) -> Tensor:
    outputs, half = codes.shape
    return tokens.new_empty(*tokens.shape[:-1], outputs if turned else 2 * half)


def _values(codes: Tensor, scale_bytes: Tensor, rounded_to: torch.dtype) -> Tensor:
    scales = scale_bytes.view(torch.float32)
    return (_rounded_at_once() if codes.is_cuda else _rounded)(codes, scales, rounded_to)


def _rounded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize(codes, scales).to(dtype)


def keep_in_nf4(layers: Iterable[nn.Module]) -> None:
    """Makes the frozen linear layers of decoder layers without storage `NF4Linear`, in place.

    Args:
        layers: the decoder layers. Indexers, to which no gradient flows, stay as they are.

    Raises:
        InputError: a layer's inputs are not whole blocks.
    """
    for layer in layers:
        for name, linear in list(frozen_linears(layer)):
            if linear.in_features % BLOCK:
                raise InputError(
                    f"model.lora.base=nf4: {name} has {linear.in_features} inputs, which are not whole blocks of "
                    f"{BLOCK}: use base=plain"
                )
            kept: Any = linear
            del kept._parameters["weight"]
            kept.__class__ = NF4Linear
            kept.few_bits = NF4Weight(linear.out_features, linear.in_features)


def frozen_linears(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of a decoder layer that a base in few bits is made of, by their names."""
    for name, module in layer.named_modules():
        is_base = type(module) is nn.Linear and not is_adapter(f"{name}.weight")
        if is_base and not module.weight.requires_grad and "indexer" not in name.split("."):
            yield name, module


def names_of_base(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and weights that a base in few bits is made of, of a causal language model."""
    for number, layer in enumerate(model.model.layers):
        for name, linear in frozen_linears(layer):
            yield f"model.layers.{number}.{name}.weight", linear.weight


def nf4_layers(part: nn.Module) -> Iterator[tuple[str, NF4Linear]]:
    """The layers of a part whose weight is in nf4, by their names."""
    yield from ((name, module) for name, module in part.named_modules() if isinstance(module, NF4Linear))


def is_few_bits(name: str) -> bool:
    """Whether a parameter, by its name, is a part of a weight in few bits."""
    return f".{HOLDER}." in name
