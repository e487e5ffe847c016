"""Low-rank adapters on linear layers."""

import itertools
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

ALL_LINEAR = "all-linear"
"""The target that stands for all linear layers but the head."""

HEAD = "lm_head"


def add_adapters(model: nn.Module, config: LoraConfig) -> LoraConfig:
    """Freezes a model without storage and gives its target layers adapters, in place.

    A layer then computes W x + b + scale * B A x. The names of its own weights stay. Modules to save stay trained.

    Returns:
        The config with only those targets that the model has.

    Raises:
        InputError: the model has none of the targets, or not one of the modules to save.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    _train_whole(model, config)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    targets = config.targets
    if ALL_LINEAR in targets:
        targets = tuple(sorted({name.rpartition(".")[2] for name in linears if name != HEAD}))
    found = set()
    for name, linear in linears.items():
        target = next((target for target in targets if is_named(name, target)), None)
        if target is None or linear.weight.requires_grad:  # a module to save needs no adapter
            continue
        found.add(target)
        options: dict[str, Any] = {"bias": False, "dtype": linear.weight.dtype, "device": linear.weight.device}
        layer: Any = linear
        layer.lora_A = nn.Linear(linear.in_features, config.rank, **options)
        layer.lora_B = nn.Linear(config.rank, linear.out_features, **options)
        layer.lora_scale, layer.lora_dropout = config.scale, config.dropout
    if not found:
        raise InputError(
            f"model.lora.targets={list(config.targets)}: no linear layer of the model has one of these names: "
            "name some of its own"
        )
    return config.model_copy(update={"targets": tuple(name for name in targets if name in found)})


def is_named(module: str, name: str) -> bool:
    """Whether a module has a name, or a full name that ends with it. PEFT has the same rule."""
    return module == name or module.endswith(f".{name}")


def _train_whole(model: Any, config: LoraConfig) -> None:
    """Leaves the modules to save trained."""
    for name in config.modules_to_save:
        modules = [module for own, module in model.named_modules() if is_named(own, name)]
        if not modules:
            raise InputError(
                f"model.lora.modules_to_save={list(config.modules_to_save)}: the model has no module {name}: name one "
                "of its own"
            )
        for parameter in itertools.chain.from_iterable(module.parameters() for module in modules):
            parameter.requires_grad_(True)
    ends = (model.get_output_embeddings(), model.get_input_embeddings()) if config.modules_to_save else ()
    if model.config.tie_word_embeddings and any(end.weight.requires_grad for end in ends):
        raise InputError(
            "model.lora.modules_to_save: the model's head is tied to its embedding, and PEFT's files would part them: "
            "leave both out"
        )


def install_adapters(part: Any) -> None:
    """Makes the layers of a part use their adapters. Call it after the split into stages, which copies modules."""
    for _, linear in adapted_weights(part):
        linear.forward = MethodType(_forward, linear)


def _forward(linear: Any, hidden: Tensor) -> Tensor:
    base = F.linear(hidden, linear.weight, linear.bias)
    if linear.lora_dropout and torch.is_grad_enabled():  # log-probabilities and evaluations are not random
        hidden = F.dropout(hidden, linear.lora_dropout)
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
    return merged(local_tensor(linear.weight), whole_down, local_tensor(linear.lora_B.weight), linear.lora_scale)


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """A weight with its adapter merged in, in fp32 or wider.

    Args:
        weight: [outputs, inputs].
        down: `lora_A` [rank, inputs].
        up: `lora_B` [outputs, rank].
        scale: the factor of the adapter's output.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide) + scale * (up.to(wide) @ down.to(wide))


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
