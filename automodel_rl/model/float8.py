"""Linear layers in fp8: weights, inputs and gradients are scaled and cast before each matrix product, by torchao.

Scales are chosen anew for every product: `tensorwise` one for each tensor, `rowwise` one for each row (Micikevicius et
al., arXiv:2209.05433, describe the formats). `rowwise` leaves the gradients of weights in bfloat16, which is more
accurate, and faster too: their rows go along the tokens, and to cast those took more time than the products saved.
Master weights, gradients, adapters and all that is not a matrix product keep their dtype.
"""

from collections.abc import Iterable

import torch
from torch import nn

from automodel_rl.config.model import Float8
from automodel_rl.errors import InputError
from automodel_rl.lora.layers import ADAPTER_NAMES, adapted_layers, move_adapter

MULTIPLE = 16
"""Sizes of fp8 products, tokens included, are multiples of this."""

RECIPES: dict[Float8, str] = {"rowwise": "rowwise_with_gw_hp", "tensorwise": "tensorwise"}
"""torchao's names."""

OLDEST = (8, 9)
"""Compute capability of the oldest GPUs with fp8 products."""


def check_float8(recipe: Float8, device: torch.device) -> None:
    """Raises InputError if the device has no fp8 products."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < OLDEST:
        raise InputError(
            f"model.fp8={recipe} needs a GPU with fp8, such as H100, and this rank has none: set it to null"
        )


def install_float8(layers: Iterable[nn.Module], recipe: Float8) -> None:
    """Replaces the linear layers of decoder layers by fp8 ones with the same parameters and adapters.

    Experts and routers are no linear layers and stay as they are; adapters are narrow, and stay, too.

    Raises:
        InputError: a linear layer has a size that is no multiple of `MULTIPLE`, or torchao is not installed.
    """
    try:  # here, because torchao takes long to import and complains of kernels that it cannot load
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
                    f"and fp8 products need multiples of {MULTIPLE}: set it to null"
                )
        adapted = set(adapted_layers(layer))
        before = {name: module for name, module in layer.named_modules() if module in adapted}
        convert_to_float8_training(layer, config=config, module_filter_fn=_is_wide)
        for name, linear in before.items():
            move_adapter(linear, layer.get_submodule(name))


def _is_wide(module: nn.Module, name: str) -> bool:
    """Whether a module is a linear layer and no adapter, by its name."""
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] not in ADAPTER_NAMES
