"""Low-rank adapters on linear layers."""

import math
import re
import zlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_rl.batch.microbatch_scope import MicrobatchScope
from automodel_rl.batch.tensors import ADAPTER_GATE
from automodel_rl.lora.magnitude import MAGNITUDE, has_magnitude, with_magnitude
from automodel_rl.parallel.sharding import local_box, local_tensor

ADAPTER_NAMES = ("lora_A", "lora_B")
ADAPTER = re.compile(rf"(.+)\.(?:{'|'.join(ADAPTER_NAMES)})\.weight")


def is_named(module: str, name: str) -> bool:
    """Returns whether a module's full name is `name` or ends with it, as in PEFT."""
    return module == name or module.endswith(f".{name}")


def install_adapters(part: Any, scope: MicrobatchScope | None = None) -> None:
    """Makes a part's layers use their adapters. Call it after the split into stages, which copies modules.

    Args:
        scope: the microbatch that a layer currently computes, and with it the training that each token belongs to;
            None if there is only one training.
    """
    for linear in adapted_layers(part):
        linear.microbatch_scope = scope or MicrobatchScope()
        linear.base_forward = linear.forward
        linear.forward = MethodType(_forward, linear)


def move_adapter(source: Any, target: Any) -> None:
    """Moves a layer's adapter to the layer that replaces it. Call it before `install_adapters`."""
    for name in (*ADAPTER_NAMES, MAGNITUDE, "lora_scale", "lora_dropout", "lora_sum"):
        setattr(target, name, getattr(source, name))


def _forward(linear: Any, hidden: Tensor) -> Tensor:
    base = linear.base_forward(hidden)
    if linear.lora_dropout and torch.is_grad_enabled():  # evaluations are deterministic
        hidden = F.dropout(hidden, linear.lora_dropout)
    down, up = (local_tensor(part.weight).to(hidden.dtype) for part in (linear.lora_A, linear.lora_B))
    low, factors = F.linear(hidden, down), linear.microbatch_scope.input(ADAPTER_GATE)
    if factors is not None:  # of all tokens; lora_sum may leave a rank only its own
        return base + F.linear(linear.lora_sum(low * factors.to(low.dtype)), up)
    change = linear.lora_scale * F.linear(linear.lora_sum(low), up)
    return with_magnitude(linear, base, change) if has_magnitude(linear) else base + change


@torch.no_grad()
def initialise_magnitudes(part: nn.Module) -> None:
    """Initialises DoRA magnitudes to the row lengths of the checkpoint's weights."""
    for linear in adapted_layers(part):
        if has_magnitude(linear):
            lengths = local_tensor(linear.lora_magnitude_vector.weight)
            weight = local_tensor(linear.weight)
            lengths.copy_(
                torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, lengths.dtype))
            )


def adapted_weights(part: nn.Module) -> Iterator[tuple[nn.Parameter, Any]]:
    """Yields a part's plain weights with adapters, and their layers."""
    for linear in adapted_layers(part):
        if "weight" in dict(linear.named_parameters(recurse=False)):
            yield linear.weight, linear


def adapted_layers(part: nn.Module) -> list[Any]:
    """Returns a part's linear layers with adapters."""
    linears = (module for module in part.modules() if isinstance(module, nn.Linear))
    return [linear for linear in linears if "lora_A" in dict(linear.named_children())]


@torch.no_grad()
def merge(linear: Any, whole_down: Tensor) -> Tensor:
    """Returns this rank's shard of a layer's weight with the adapter merged, in fp32 or wider.

    Weight and `lora_B` are cut alike along the outputs, weight and `lora_A` along the inputs. `whole_down` is the
    whole `lora_A`.
    """
    down = whole_down[:, local_box(linear.lora_A.weight)[1]]
    lengths = local_tensor(linear.lora_magnitude_vector.weight) if has_magnitude(linear) else None
    weight, up = local_tensor(linear.weight), local_tensor(linear.lora_B.weight)
    return merged(weight, down, up, linear.lora_scale, lengths=lengths)


def merged(
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    scale: float,
    is_transposed: bool = False,
    lengths: Tensor | None = None,
) -> Tensor:
    """Returns a weight with its adapter merged, in fp32 or wider.

    Args:
        weight: [outputs, inputs], or a stack of such matrices with a stacked adapter.
        down: `lora_A` [rank, inputs].
        up: `lora_B` [outputs, rank].
        is_transposed: whether the weight is [inputs, outputs] instead.
        lengths: DoRA magnitudes of its rows, [outputs]; needs whole rows.
    """
    wide = torch.promote_types(torch.promote_types(weight.dtype, up.dtype), torch.float32)
    own = weight.mT if is_transposed else weight
    result = own.to(wide) + scale * (up.to(wide) @ down.to(wide))
    if lengths is not None:
        found = torch.linalg.vector_norm(result, dim=1).clamp(min=torch.finfo(wide).tiny)
        result *= (lengths.to(wide) / found)[:, None]
    return result.mT if is_transposed else result


def is_adapter(name: str) -> bool:
    return any(f".{adapter}." in name for adapter in (*ADAPTER_NAMES, MAGNITUDE))


@torch.no_grad()
def initialise(name: str, parameter: Tensor, seed: int = 0, rows: slice = slice(None)) -> None:
    """Initialises this rank's shard of an adapter: A as PEFT does, B with 0. The whole tensor is the same on every
    layout.

    Args:
        name: the adapter's name, which with `seed` determines its values.
        rows: the rows of A to initialise; the others become 0.
    """
    if ".lora_B." in name:
        local_tensor(parameter).zero_()
        return
    if ".lora_A." not in name:
        raise ValueError(f"{name} is not an adapter that begins without the checkpoint's weights")
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
    bound = 1 / math.sqrt(parameter.shape[-1])  # kaiming_uniform with a = sqrt(5)
    whole = torch.zeros(parameter.shape, dtype=torch.float64)
    used = whole[..., rows, :]
    used.copy_(torch.empty(used.shape, dtype=torch.float64).uniform_(-bound, bound, generator=generator))
    local_tensor(parameter).copy_(whole[local_box(parameter)])
