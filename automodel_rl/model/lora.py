"""Low-rank adapters on linear layers, and their files in PEFT's format."""

import contextlib
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from automodel_rl.config.families import FAMILIES
from automodel_rl.config.model import LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.files import complete_folder
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import gather_whole, local_box, local_tensor

ADAPTER_NAMES = ("lora_A", "lora_B")
ADAPTER = re.compile(rf"(.+)\.(?:{'|'.join(ADAPTER_NAMES)})\.weight")
PEFT_PREFIX = "base_model.model."


def add_adapters(model: nn.Module, config: LoraConfig) -> LoraConfig:
    """Freezes a model without storage and gives its target layers adapters, in place.

    A layer computes W x + b + alpha / rank * B A x; names of its own weights stay.

    Returns:
        The config with those targets only that the model has.
    """
    if "lm_head" in config.targets:
        raise InputError(
            "model.lora.targets: lm_head cannot have adapters, for log-probabilities read its weight: remove it"
        )
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
    """Makes the layers of a part use their adapters. After the split, which copies modules."""
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
    """This rank's shard of the weight that does what a layer and its adapter do, in fp32 or wider.

    Weight and `lora_B` are cut alike, for both have the layer's outputs first.

    Args:
        linear: a layer with an adapter.
        whole_down: all of its `lora_A`.
    """
    weight, up = local_tensor(linear.weight), local_tensor(linear.lora_B.weight)
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide) + linear.lora_scale * (up.to(wide) @ whole_down.to(wide))


@contextlib.contextmanager
def without_adapters(parts: list[Any]) -> Iterator[None]:
    """Within this block layers do what they did before adapters were added."""
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
    """Fills this rank's shard of an adapter: A as PEFT does, B with 0. The same whole tensor on every layout."""
    if ".lora_B." in name:
        local_tensor(parameter).zero_()
        return
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(parameter.shape[1])  # kaiming_uniform with a = sqrt(5)
    whole = torch.empty(parameter.shape, dtype=torch.float64).uniform_(-bound, bound, generator=generator)
    local_tensor(parameter).copy_(whole[local_box(parameter)])


@dataclass(frozen=True)
class AdapterOrigin:
    """What adapters belong to.

    Attributes:
        config: of the adapters.
        base: the checkpoint.
        family: of its model, a key of `FAMILIES`.
    """

    config: LoraConfig
    base: Path
    family: str


def save_adapters(
    folder: Path,
    parameters: Iterator[tuple[str, nn.Parameter]],
    origin: AdapterOrigin,
    tokenizer: PreTrainedTokenizerBase | None,
    layout: Layout,
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json, which PEFT opens. A collective.

    Args:
        folder: replaced if it exists; on a file system that all ranks share.
        parameters: this rank's, of which adapters are written.
        origin: what they belong to.
        tokenizer: saved along, if given.
        layout: this rank's place.
    """
    own = {name: gather_whole(p, layout).cpu() for name, p in parameters if is_adapter(name)}
    of_stages = gather_objects(own, layout.pp_control)
    with complete_folder(folder, layout.world_control) as unfinished:
        if dist.get_rank() == 0:
            write_adapters(unfinished, {k: v for stage in of_stages for k, v in stage.items()}, origin)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)


def write_adapters(folder: Path, tensors: dict[str, Tensor], origin: AdapterOrigin) -> None:
    """Writes adapters as PEFT does.

    Args:
        folder: that exists.
        tensors: all adapters by name.
        origin: what they belong to.
    """
    named = {f"{PEFT_PREFIX}{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    layers = sorted({layer for name in tensors for layer in ADAPTER.findall(name)})
    (folder / "adapter_config.json").write_text(json.dumps(_peft_config(layers, origin), indent=2))


def _peft_config(layers: list[str], origin: AdapterOrigin) -> dict[str, Any]:
    """PEFT takes the names that a mixture's experts have in files for its fused experts, wherever one of them ends an
    entry of `target_modules`: dense layers and shared experts that have these names are given by their weights."""
    experts = FAMILIES[origin.family].experts
    of_experts = () if experts is None else (experts.gate, experts.up, experts.down)
    by_weight = [layer for layer in layers if layer.rpartition(".")[2] in of_experts]
    by_name = {layer.rpartition(".")[2] for layer in layers if layer not in by_weight}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(origin.base),
        "r": origin.config.rank,
        "lora_alpha": origin.config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(by_name),
        "target_parameters": [f"{layer}.weight" for layer in by_weight],
        "inference_mode": True,
    }
