"""Builds the whole model without storage, from classes of transformers or nemo_automodel."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig

from automodel_rl.compat.modules import parameters_without_storage
from automodel_rl.compat.nemo import check_installed, nemo_model
from automodel_rl.compat.nemo_mixtures import nemo_mixture
from automodel_rl.config.model import Implementation
from automodel_rl.families.classifier import is_classifier
from automodel_rl.families.family import Family
from automodel_rl.families.known import (
    FAMILIES,
    encoder_families,
    language_config,
    language_family,
    multimodal_family,
)
from automodel_rl.mixture.experts import EXPERTS, register_experts, transpose_experts
from automodel_rl.mixture.routers import routers_of
from automodel_rl.model.attention import register_attention
from automodel_rl.model.encoder import EncoderPart, language_model, split_modules
from automodel_rl.model.mtp import add_mtp_layer
from automodel_rl.model.part_forward import numbered_layers
from automodel_rl.model.token_mixers.known import set_decays_apart
from automodel_rl.quantized.formats import QuantizedFormat
from automodel_rl.support.description import describe_model, experts_per_token


@dataclass(frozen=True)
class EmptyModel:
    """A model without storage, divided into language model and encoders.

    Attributes:
        language: a causal language model, or a module with the same names.
        encoders: by component; empty for text models.
        base: quantized formats of an adapters' base, by weight name; other weights are plain.
    """

    config: PretrainedConfig
    language: Any
    encoders: dict[str, EncoderPart]
    base: Mapping[str, QuantizedFormat] = field(default_factory=dict)

    @property
    def parts(self) -> list[Any]:
        return [self.language, *self.encoders.values()]


def build_empty_model(
    config: PretrainedConfig,
    implementation: Implementation,
    dtype: torch.dtype,
    attention: str,
    untie: bool,
    has_mtp: bool = False,
) -> EmptyModel:
    """Builds the whole model without storage for its parameters.

    Buffers have storage: nothing recomputes a pipeline stage's rotary frequencies, and on the meta device they would
    silently stay uninitialised.

    Args:
        attention: name of a registered attention function.
        untie: gives a tied head its own parameter, loaded with the same values, as pipelines need.

    Raises:
        InputError: the package is not installed.
    """
    if implementation == "nemo_automodel":
        check_installed()
    register_attention()
    register_experts()
    with parameters_without_storage():
        family = language_family(config)
        if implementation == "nemo_automodel" and not family.is_moe:
            assert family.nemo_class is not None  # the support table has rejected other families
            model = nemo_model(family.nemo_class, config, dtype, attention)
        elif multimodal_family(config) is not None:
            encoders = {f"{name}_config": "sdpa" for name in encoder_families(config)}
            model = AutoModelForMultimodalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation={"text_config": attention, **encoders},
                experts_implementation={"text_config": EXPERTS},
            )
        else:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, experts_implementation=EXPERTS
            )
        if implementation == "nemo_automodel" and family.is_moe:
            assert family.nemo_class is not None
            model = nemo_mixture(family.nemo_class, config, model, family.router, family.router_bias)
        if has_mtp:
            add_mtp_layer(model, language_family(config).mtp_kinds)
    return _completed(model, config, dtype, untie)


def _completed(model: Any, config: PretrainedConfig, dtype: torch.dtype, untie: bool) -> EmptyModel:
    """Adds a linear head, ties or unties the vocabulary's, and adapts names and parameters to the family."""
    family = language_family(config)
    if is_classifier(config):
        model.lm_head = nn.Linear(config.hidden_size, config.num_labels, bias=False, dtype=dtype)
    if config.tie_word_embeddings:  # building without storage has cut the tie
        weight = model.get_input_embeddings().weight
        model.lm_head.weight = nn.Parameter(torch.empty_like(weight)) if untie else weight
    transpose_experts(model, family)
    rename_modules(model, family)
    layers = numbered_layers(language_model(model))
    set_decays_apart([*layers.values()], family)
    _set_sizes_of_routers(layers, language_config(config))
    if multimodal_family(config) is None:
        _make_uniform(model, dtype, family.router_bias)
        return EmptyModel(config, model, {})
    return EmptyModel(config, *split_modules(model, language_config(config)))


def rename_modules(model: Any, family: Family) -> None:
    """Gives modules of a model's body their usual names. A body without rotary embeddings gets `rotary_emb = None`."""
    body = language_model(model).model
    for own, usual in family.renamed_modules:
        setattr(body, usual, body.get_submodule(own))
        delattr(body, own)
    if "rotary_emb" not in dict(body.named_children()):
        body.rotary_emb = None


def _set_sizes_of_routers(layers: dict[int, Any], config: PretrainedConfig) -> None:
    """Sets `num_experts` and `top_k` on routers that read them from the config."""
    for router in routers_of(layers, FAMILIES[config.model_type]).values():
        vars(router).setdefault("num_experts", describe_model(config).num_experts)
        vars(router).setdefault("top_k", experts_per_token(config))


def _make_uniform(model: nn.Module, dtype: torch.dtype, router_bias: str) -> None:
    """Casts all parameters to one dtype, as FSDP requires. Router biases become buffers: no optimizer trains them,
    and every rank needs them whole."""
    for name, parameter in list(model.named_parameters()):
        if router_bias and name.endswith(f".{router_bias}"):
            owner, _, own_name = name.rpartition(".")
            module = model.get_submodule(owner)
            delattr(module, own_name)
            module.register_buffer(own_name, torch.zeros(parameter.shape))
        elif parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
