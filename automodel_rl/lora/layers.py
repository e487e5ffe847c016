"""Low-rank adapters on linear layers."""

import contextlib
import math
import re
import zlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_rl.config.model import LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.parallel.sharding import local_box, local_tensor

ADAPTER_NAMES = ("lora_A", "lora_B")
ADAPTER = re.compile(rf"(.+)\.(?:{'|'.join(ADAPTER_NAMES)})\.weight")


def add_adapters(model: nn.Module, config: LoraConfig) -> LoraConfig:
    """Freezes a model without storage and gives its target layers adapters, in place.

    A layer then computes W x + b + alpha / rank * B A x. The names of its own weights stay.

    Returns:
        The config with only those targets that the model has.

    Raises:
        InputError: the model has none of the targets.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets: dict[Any, str] = {
        module: short for name, module in linears if (short := name.rpartition(".")[2]) in config.targets
    }
    if not targets:
        raise InputError(
            f"model.lora.targets={list(config.targets)}: no linear layer of the model has one of these names: "
            "name some of its own"
        )
    for linear in targets:
        options: dict[str, Any] = {"bias": False, "dtype": linear.weight.dtype, "device": linear.weight.device}
        linear.lora_A = nn.Linear(linear.in_features, config.rank, **options)
        linear.lora_B = nn.Linear(config.rank, linear.out_features, **options)
        linear.lora_scale = config.alpha / config.rank
    found = set(targets.values())
    return config.model_copy(update={"targets": tuple(name for name in config.targets if name in found)})


def install_adapters(part: Any) -> None:
    """Makes the layers of a part use their adapters. Call it after the split into stages, which copies modules."""
    for _, linear in adapted_weights(part):
        linear.forward = MethodType(_forward, linear)


def _forward(linear: Any, hidden: Tensor) -> Tensor:
    base = F.linear(hidden, linear.weight, linear.bias)
    return base + linear.lora_scale * linear.lora_B(linear.lora_A(hidden))


def adapted_weights(part: nn.Module) -> Iterator[tuple[nn.Parameter, Any]]:
    """The weights of a part that have adapters, and their layers."""
    linear: Any
    for linear in part.modules():
        if "lora_A" in dict(linear.named_children()):
            yield linear.weight, linear


@torch.no_grad()
def merge(linear: Any, whole_down: Tensor) -> Tensor:
    """This rank's shard of a layer's weight with the adapter merged in, in fp32 or wider.

    Weight and `lora_B` are cut alike: the first dim of both is that of the layer's outputs.

    Args:
        linear: a layer with an adapter.
        whole_down: the whole of its `lora_A`.
    """
    weight, up = local_tensor(linear.weight), local_tensor(linear.lora_B.weight)
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide) + linear.lora_scale * (up.to(wide) @ whole_down.to(wide))


@contextlib.contextmanager
def without_adapters(parts: list[Any]) -> Iterator[None]:
    """Switches adapters off for this block: layers compute what they did before adapters were added."""
    linears = [linear for part in parts for _, linear in adapted_weights(part)]
    scales = [linear.lora_scale for linear in linears]
    for linear in linears:
        linear.lora_scale = 0.0
    try:
        yield
    finally:
        for linear, scale in zip(linears, scales, strict=True):
            linear.lora_scale = scale


def is_adapter(name: str) -> bool:
    return any(f".{adapter}." in name for adapter in ADAPTER_NAMES)


@torch.no_grad()
def initialise(name: str, parameter: Tensor) -> None:
    """Fills this rank's shard of an adapter: A as PEFT does, B with 0. The whole tensor is the same on every layout."""
    if ".lora_B." in name:
        local_tensor(parameter).zero_()
        return
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(parameter.shape[1])  # kaiming_uniform with a = sqrt(5)
    whole = torch.empty(parameter.shape, dtype=torch.float64).uniform_(-bound, bound, generator=generator)
    local_tensor(parameter).copy_(whole[local_box(parameter)])
