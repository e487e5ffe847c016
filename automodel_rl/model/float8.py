"""Linear layers in fp8: torchao scales and casts weights, inputs and gradients before each matrix product.

Scales are computed anew for every product, per tensor (`tensorwise`) or per row (`rowwise`); formats: Micikevicius et
al., arXiv:2209.05433. `rowwise` leaves weight gradients in bfloat16: more accurate, and faster, since casting along
the tokens took longer than fp8 products saved. Everything that is not a matrix product keeps its dtype.
"""

from collections.abc import Iterable

import torch
from torch import nn

from automodel_rl.config.model import Float8
from automodel_rl.errors import InputError
from automodel_rl.lora.layers import ADAPTER_NAMES, adapted_layers, move_adapter

MULTIPLE = 16
"""All dimensions of fp8 products, tokens included, are multiples of this."""

RECIPES: dict[Float8, str] = {"rowwise": "rowwise_with_gw_hp", "tensorwise": "tensorwise"}
"""torchao's recipe names."""

OLDEST = (8, 9)
"""Lowest compute capability with fp8 products."""


def check_float8(recipe: Float8, device: torch.device) -> None:
    """Raises InputError if the device has no fp8 products."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < OLDEST:
        raise InputError(
            f"model.fp8={recipe} needs a GPU with fp8, such as H100, but this rank has none: set it to null"
        )


def install_float8(layers: Iterable[nn.Module], recipe: Float8) -> None:
    """Replaces linear layers of decoder layers with fp8 layers that keep their parameters and adapters. Experts,
    routers and the narrow adapter matrices stay as they are.

    Raises:
        InputError: a dimension is not a multiple of `MULTIPLE`, or torchao is not installed.
    """
    try:  # not at the top: torchao is slow to import and warns about kernels that it cannot load
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError:
        raise InputError(
            f"model.fp8={recipe} needs torchao, which is not installed: pip install 'automodel-rl[fp8]', or set it to "
            "null"
        ) from None

    config = Float8LinearConfig.from_recipe_name(RECIPES[recipe])
    for layer in layers:
        for name, linear in layer.named_modules():
            sizes = (linear.in_features, linear.out_features) if _is_wide(linear, name) else ()
            if any(size % MULTIPLE for size in sizes):
                raise InputError(
                    f"model.fp8={recipe}: {name} has {linear.in_features} inputs and {linear.out_features} outputs, "
                    f"but fp8 products need multiples of {MULTIPLE}: set it to null"
                )
        adapted = set(adapted_layers(layer))
        before = {name: module for name, module in layer.named_modules() if module in adapted}
        convert_to_float8_training(layer, config=config, module_filter_fn=_is_wide)
        for name, linear in before.items():
            move_adapter(linear, layer.get_submodule(name))


def _is_wide(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] not in ADAPTER_NAMES
