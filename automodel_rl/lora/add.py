"""Adds adapters to a model before it is split and has storage."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from automodel_rl.config.model import LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.lora.experts import add_expert_adapters
from automodel_rl.lora.layers import is_named
from automodel_rl.lora.magnitude import Magnitude

ALL_LINEAR = "all-linear"
"""Target for all linear layers except the head. Experts are not linear layers."""

HEAD = "lm_head"


@dataclass(frozen=True)
class Encoder:
    """An encoder before a language model, as adapters see it.

    Attributes:
        projectors: full names of the projector's modules.
    """

    part: nn.Module
    name: str
    projectors: tuple[str, ...]

    def target_of(self, layer: str, targets: Sequence[str]) -> str | None:
        """Returns the target that matches a layer by its full name, else None. Partial names refer to the language
        model only."""
        whole = "projector" if layer.startswith(tuple(f"{name}." for name in self.projectors)) else self.name
        by_name = (target for target in targets if layer in (target, f"model.{target}"))
        return whole if whole in targets else next(by_name, None)


def add_adapters(model: nn.Module, config: LoraConfig, encoders: Sequence[Encoder] = ()) -> LoraConfig:
    """Freezes a model without storage, and adds adapters to its target layers and experts, in place.

    A layer then computes W x + b + scale * B A x, or with DoRA the formula in magnitude.py. Its own weights keep
    their names. Modules to save stay trainable.

    Returns:
        The config with only the targets found in the model.

    Raises:
        InputError: the model has none of the targets, or lacks one of the modules to save.
    """
    parts = [model, *(encoder.part for encoder in encoders)]
    for parameter in itertools.chain(*(part.parameters() for part in parts)):
        parameter.requires_grad_(False)
    _train_whole(model, parts, config)
    linears = _linears(model)
    targets = config.targets
    if ALL_LINEAR in targets:
        targets = tuple(sorted({*targets, *(name.rpartition(".")[2] for name in linears if name != HEAD)}))
    found = add_expert_adapters(model, config)
    chosen = [(next((t for t in targets if is_named(name, t)), None), linear) for name, linear in linears.items()]
    for encoder in encoders:
        chosen += [(encoder.target_of(name, targets), linear) for name, linear in _linears(encoder.part).items()]
    for target, linear in chosen:
        if target is None or linear.weight.requires_grad:  # a module to save needs no adapter
            continue
        found.add(target)
        _add_adapter(linear, config)
    if not found:
        names = sorted({name.rpartition(".")[2] for name in linears if name != HEAD})
        raise InputError(
            f"model.lora.targets={list(config.targets)}: no linear layer of the model has one of these names, nor do "
            f"they match its experts: it has {', '.join(names)}"
        )
    return config.model_copy(update={"targets": tuple(name for name in targets if name in found)})


def _linears(part: nn.Module) -> dict[str, nn.Linear]:
    """Returns a part's linear layers by name, except indexers', which receive no gradient."""
    linears = {name: module for name, module in part.named_modules() if isinstance(module, nn.Linear)}
    return {name: linear for name, linear in linears.items() if ".indexer." not in name}


def _add_adapter(layer: Any, config: LoraConfig) -> None:
    options: dict[str, Any] = {"bias": False, "dtype": layer.weight.dtype, "device": layer.weight.device}
    layer.lora_A = nn.Linear(layer.in_features, config.rank, **options)
    layer.lora_B = nn.Linear(config.rank, layer.out_features, **options)
    layer.lora_magnitude_vector = None
    if config.dora:
        layer.lora_magnitude_vector = Magnitude(layer.out_features, dtype=options["dtype"], device=options["device"])
    layer.lora_scale, layer.lora_dropout, layer.lora_sum = config.scale, config.dropout, _as_it_is


def _as_it_is(low: Tensor) -> Tensor:
    """Identity, for an unsplit `lora_A`."""
    return low


def _train_whole(model: Any, parts: Sequence[nn.Module], config: LoraConfig) -> None:
    """Makes the modules to save trainable."""
    for name in config.modules_to_save:
        modules = [module for part in parts for own, module in part.named_modules() if is_named(own, name)]
        if not modules:
            raise InputError(
                f"model.lora.modules_to_save={list(config.modules_to_save)}: the model has no module {name}: name one "
                "that it has"
            )
        for parameter in itertools.chain.from_iterable(module.parameters() for module in modules):
            parameter.requires_grad_(True)
    within = [module for part in parts for module in part.modules() if isinstance(module, nn.ModuleList)]
    if config.dora and any(parameter.requires_grad for layers in within for parameter in layers.parameters()):
        raise InputError(
            f"model.lora.dora=true with model.lora.modules_to_save={list(config.modules_to_save)}: what layers train "
            "beside adapters would compute in float32: remove modules of layers"
        )
    ends = (model.lm_head, model.model.embed_tokens) if config.modules_to_save else ()
    if model.config.tie_word_embeddings and any(end.weight.requires_grad for end in ends):
        raise InputError(
            "model.lora.modules_to_save: the model's head is tied to its embedding, but PEFT's files would untie them: "
            "remove both"
        )
