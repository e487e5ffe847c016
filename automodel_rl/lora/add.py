"""Gives a model its adapters, before it is split and has storage."""

import itertools
from typing import Any

from torch import nn

from automodel_rl.config.model import LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.lora.experts import add_expert_adapters
from automodel_rl.lora.layers import is_named

ALL_LINEAR = "all-linear"
"""The target that stands for all linear layers but the head; experts are none."""

HEAD = "lm_head"


def add_adapters(model: nn.Module, config: LoraConfig) -> LoraConfig:
    """Freezes a model without storage and gives its target layers and experts adapters, in place.

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
        targets = tuple(sorted({*targets, *(name.rpartition(".")[2] for name in linears if name != HEAD)}))
    found = add_expert_adapters(model, config)
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
            f"model.lora.targets={list(config.targets)}: no linear layer of the model has one of these names, nor do "
            "they mean its experts: name some of its own"
        )
    return config.model_copy(update={"targets": tuple(name for name in targets if name in found)})


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
