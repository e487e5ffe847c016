"""Adapters of linear layers that tensor parallelism splits.

Where ranks hold rows of the weight, B has the same rows, and each rank's gradient of A is a summand. Where they hold
columns, A has the same columns, its (narrow) output is summed over the ranks, and B is whole.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from automodel_rl.errors import InputError
from automodel_rl.lora.layers import adapted_layers
from automodel_rl.parallel.sharding import shard_parameter
from automodel_rl.parallel.tensor_parallel import COLUMNS, ROWS, SECTIONS, TensorParallel


def split_adapters(
    part: nn.Module, style_of: Callable[[str], str | None], mesh: DeviceMesh, how: TensorParallel
) -> list[tuple[nn.Module, str]]:
    """Splits a part's adapters, still without storage, before its linear layers are split.

    Returns:
        Parameters, as (module, name), whose gradient on each rank is only a summand.

    Raises:
        InputError: a layer with adapters has rows of several sections.
    """
    partial: list[tuple[nn.Module, str]] = []
    adapted = set(adapted_layers(part))
    layers: list[tuple[str, Any]] = [(name, module) for name, module in part.named_modules() if module in adapted]
    for name, layer in layers:
        style = style_of(name)
        if style in SECTIONS:
            raise InputError(
                f"model.lora.targets with parallel.tp={mesh.size()}: {name} is several layers in one, whose adapters "
                "are not split: remove it from the targets, or use dp_shard"
            )
        if style == COLUMNS:
            shard_parameter(layer.lora_B, "weight", mesh, dim=0)
            partial.append((layer.lora_A, "weight"))
        elif style == ROWS:
            shard_parameter(layer.lora_A, "weight", mesh, dim=1)
            layer.lora_sum = how.leave
    return partial
