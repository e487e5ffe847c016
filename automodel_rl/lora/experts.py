"""Low-rank adapters on the experts of a mixture: each expert has its own, stacked as the experts' weights are.

An experts module keeps them as `adapters.gate_up_proj` and `adapters.down_proj`, beside the weights of these names.
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
"""The name of every experts module, and the target that stands for all its weights."""

STACKED = ("gate_up_proj", "down_proj")
"""An experts module's weights, in the order in which it has them."""

UP = "up_proj"
"""The first weight of experts without a gate, which get no adapters."""

ADAPTERS = "adapters"


class Stack(nn.Module):
    """One matrix for each expert: `weight` [experts, outputs, inputs]."""

    def __init__(self, shape: tuple[int, int, int], like: Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))


class ExpertAdapter(nn.Module):
    """The adapters of one stacked weight.

    Attributes:
        lora_A: [experts, rank, inputs].
        lora_B: [experts, outputs, rank].
        scale: the factor of the adapters' output.
    """

    def __init__(self, weight: Tensor, is_transposed: bool, config: LoraConfig):
        super().__init__()
        num_experts, outputs, inputs = (weight.mT if is_transposed else weight).shape
        self.lora_A = Stack((num_experts, config.rank, inputs), weight)
        self.lora_B = Stack((num_experts, outputs, config.rank), weight)
        self.scale = config.scale


def add_expert_adapters(model: nn.Module, config: LoraConfig) -> set[str]:
    """Gives those stacked weights adapters that the config's targets name; the targets that name some.

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
            raise InputError("model.lora.targets: experts without a gate get no adapters: leave experts out")
        for name in STACKED if experts.has_gate else ():
            target = next((target for target in config.targets if _names(target, path, name)), None)
            if target is not None and not getattr(experts, name).requires_grad:
                found.add(target)
                adapters[name] = ExpertAdapter(getattr(experts, name), experts.is_transposed, config)
        if adapters:
            experts.adapters = adapters
    return found


def _names(target: str, path: str, name: str) -> bool:
    """Whether a target names a stacked weight. Its bare name does not: shared experts and dense layers have it, too."""
    return is_named(path, target) or (target != name and is_named(f"{path}.{name}", target))


def adapter_of(experts: nn.Module, name: str) -> Any:
    """The `ExpertAdapter` of one of a module's stacked weights; None if it has none."""
    adapters = dict(experts.named_children()).get(ADAPTERS)
    return None if adapters is None else dict(adapters.named_children()).get(name)


def adapted_stacks(part: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[nn.Module, str]]]:
    """The plain stacked weights of a part that have adapters, each with its experts module and its name there."""
    for path, module in part.named_modules():
        plain = dict(module.named_parameters(recurse=False)) if is_named(path, EXPERTS) else {}
        for name in STACKED:
            if name in plain and adapter_of(module, name) is not None:
                yield getattr(module, name), (module, name)


@torch.no_grad()
def merge_stack(experts: Any, name: str, plain: Callable[[], Tensor] | None = None) -> Tensor:
    """This rank's shard of a stacked weight with the adapters merged in, in fp32 or wider.

    Weight and adapters are cut alike, by experts.

    Args:
        experts: the experts module.
        name: the weight's name there.
        plain: gives the shard of a weight that the module has in few bits.
    """
    adapter = adapter_of(experts, name)
    weight = local_tensor(getattr(experts, name)) if plain is None else plain()
    down, up = local_tensor(adapter.lora_A.weight), local_tensor(adapter.lora_B.weight)
    return merged(weight, down, up, adapter.scale, experts.is_transposed)


def adapted_weight(layer: str) -> str:
    """The name of the weight that an adapter belongs to, by what its name has before `.lora_A`."""
    experts, between, name = layer.rpartition(f".{EXPERTS}.{ADAPTERS}.")
    return f"{experts}.{EXPERTS}.{name}" if between else f"{layer}.weight"


def adapted_weights_by_name(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The layers with adapters among named tensors, by the names of the weights that they belong to."""
    return {adapted_weight(match[1]): match[1] for name in tensors if (match := ADAPTER.fullmatch(name))}
