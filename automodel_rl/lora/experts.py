"""Low-rank adapters on a mixture's experts: each expert has its own, stacked like the experts' weights.

An experts module holds them as `adapters.gate_up_proj` and `adapters.down_proj`, beside the weights of these names.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.config.model import LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.lora.layers import ADAPTER, is_named, merged
from automodel_rl.parallel.sharding import local_tensor

EXPERTS = "experts"
"""Name of every experts module, and the target for all its weights."""

STACKED = ("gate_up_proj", "down_proj")
"""An experts module's weights, in order."""

UP = "up_proj"
"""The first weight of experts without a gate, which get no adapters."""

ADAPTERS = "adapters"


class Stack(nn.Module):
    """One matrix per expert: `weight` [experts, outputs, inputs]."""

    def __init__(self, shape: tuple[int, int, int], like: Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))


class ExpertAdapter(nn.Module):
    """The adapters of one stacked weight.

    Attributes:
        lora_A: [experts, rank, inputs].
        lora_B: [experts, outputs, rank].
    """

    def __init__(self, weight: Tensor, is_transposed: bool, config: LoraConfig):
        super().__init__()
        num_experts, outputs, inputs = (weight.mT if is_transposed else weight).shape
        self.lora_A = Stack((num_experts, config.rank, inputs), weight)
        self.lora_B = Stack((num_experts, outputs, config.rank), weight)
        self.scale = config.scale


def add_expert_adapters(model: nn.Module, config: LoraConfig) -> set[str]:
    """Adds adapters to the stacked weights that the config's targets name. Returns the targets that matched.

    Raises:
        InputError: a target names experts without a gate.
    """
    found = set()
    for path, module in model.named_modules():
        if not is_named(path, EXPERTS):
            continue
        experts: Any = module
        adapters = nn.ModuleDict()
        if not experts.has_gate and any(_names(target, path, name) for target in config.targets for name in STACKED):
            raise InputError("model.lora.targets: experts without a gate do not support adapters: remove experts")
        for name in STACKED if experts.has_gate else ():
            target = next((target for target in config.targets if _names(target, path, name)), None)
            if target is not None and not getattr(experts, name).requires_grad:
                found.add(target)
                adapters[name] = ExpertAdapter(getattr(experts, name), experts.is_transposed, config)
        if adapters:
            experts.adapters = adapters
    return found


def _names(target: str, path: str, name: str) -> bool:
    """Returns whether a target names a stacked weight. Its bare name does not: shared experts and dense layers use
    it, too."""
    return is_named(path, target) or (target != name and is_named(f"{path}.{name}", target))


def adapter_of(experts: nn.Module, name: str) -> Any:
    """Returns the `ExpertAdapter` of one of a module's stacked weights; None if it has none."""
    adapters = dict(experts.named_children()).get(ADAPTERS)
    return None if adapters is None else dict(adapters.named_children()).get(name)


def adapted_stacks(part: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[nn.Module, str]]]:
    """Yields a part's plain stacked weights with adapters, each with its experts module and its name there."""
    for path, module in part.named_modules():
        plain = dict(module.named_parameters(recurse=False)) if is_named(path, EXPERTS) else {}
        for name in STACKED:
            if name in plain and adapter_of(module, name) is not None:
                yield getattr(module, name), (module, name)


@torch.no_grad()
def merge_stack(experts: Any, name: str, plain: Callable[[], Tensor] | None = None) -> Tensor:
    """Returns this rank's shard of a stacked weight with the adapters merged, in fp32 or wider. Weight and adapters
    are cut alike, by experts. `plain` returns the shard of a quantized weight."""
    adapter = adapter_of(experts, name)
    weight = local_tensor(getattr(experts, name)) if plain is None else plain()
    down, up = local_tensor(adapter.lora_A.weight), local_tensor(adapter.lora_B.weight)
    return merged(weight, down, up, adapter.scale, experts.is_transposed)


def adapted_weight(layer: str) -> str:
    """Returns the name of an adapter's weight, given the adapter's name up to `.lora_A`."""
    experts, between, name = layer.rpartition(f".{EXPERTS}.{ADAPTERS}.")
    return f"{experts}.{EXPERTS}.{name}" if between else f"{layer}.weight"


def adapted_weights_by_name(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the layers with adapters among named tensors, by the names of their weights."""
    return {adapted_weight(match[1]): match[1] for name in tensors if (match := ADAPTER.fullmatch(name))}
