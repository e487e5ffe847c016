"""Sizes of a model's tensors on a layout, from its config alone: no weights, no process groups."""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig

from automodel_rl.compat.modules import text_model
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.families.classifier import is_classifier
from automodel_rl.families.known import FAMILIES, language_config, language_family, multimodal_family
from automodel_rl.families.text import TEXT_FAMILIES
from automodel_rl.lora.add import add_adapters
from automodel_rl.lora.layers import is_adapter
from automodel_rl.mixture.experts import transpose_experts
from automodel_rl.model.build import rename_modules
from automodel_rl.model.encoder import as_encoder, freeze, split_modules
from automodel_rl.model.mtp import add_mtp_layer
from automodel_rl.model.sparse_attention import freeze_indexers
from automodel_rl.parallel.tensor_parallel import BY_HEADS, COLUMNS, ROWS, WIDE_NORM
from automodel_rl.quantized.base import names_of_base

LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ParameterSize:
    """One parameter.

    Attributes:
        name: name in the model.
        layer: index of its layer; None for embedding, final norm and head.
        shape: shape on a rank before FSDP shards it.
        fsdp_size: number of ranks over which FSDP shards it.
        kept_in: storage format of a frozen parameter kept quantized; otherwise empty.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    fsdp_size: int
    is_trained: bool
    kept_in: str = ""

    @property
    def gathered(self) -> int:
        """Elements on a rank when gathered."""
        return prod(self.shape)

    @property
    def is_gathered(self) -> bool:
        """Whether a step needs a gathered copy. Unsharded frozen weights are used in place."""
        return self.is_trained or self.fsdp_size > 1

    @property
    def largest_shard(self) -> int:
        """Elements on the first rank of an FSDP group; no rank has more."""
        return -(-self.shape[0] // self.fsdp_size) * prod(self.shape[1:])


def causal_model(config: PretrainedConfig, **options: Any) -> Any:
    """Builds a causal language model, even if transformers has it only as a part of another model; with a linear head
    if the config is a sequence classifier's."""
    if config.model_type in TEXT_FAMILIES:
        model = AutoModelForCausalLM.from_config(config, **options)
        if is_classifier(config):
            model.lm_head = nn.Linear(config.hidden_size, config.num_labels, bias=False, dtype=options["dtype"])
        rename_modules(model, FAMILIES[config.model_type])
        return model
    options.pop("experts_implementation", None)
    part: Any = nn.Module()
    part.config, part.model = config, text_model(config, **options)
    part.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=options["dtype"])
    if config.tie_word_embeddings:
        part.lm_head.weight = part.model.embed_tokens.weight
    return part


def empty_parts(config: PretrainedConfig, dtype: torch.dtype, model_config: ModelConfig) -> list[Any]:
    """Builds the language model and the encoders, if any, on the meta device, with the adapters and frozen parts of
    `model_config`. `config` is that of the whole model."""
    lora = model_config.lora
    if multimodal_family(config) is None:
        with torch.device("meta"):
            model = causal_model(config, dtype=dtype)
            if model_config.mtp is not None:
                add_mtp_layer(model, language_family(config).mtp_kinds)
        if model_config.indexer is None:
            freeze_indexers(model.model.layers, language_family(config))
        if lora is not None:
            add_adapters(model, lora)
        return [model]
    with torch.device("meta"):
        whole = AutoModelForMultimodalLM.from_config(copy.deepcopy(config), dtype=dtype)
        transpose_experts(whole, language_family(config))
        language, encoders = split_modules(whole, language_config(config))
        if config.tie_word_embeddings:
            language.lm_head.weight = language.model.embed_tokens.weight
    freeze(language, encoders, model_config.frozen)
    if lora is not None:
        add_adapters(language, lora, [as_encoder(part) for part in encoders.values()])
    return [language, *encoders.values()]


def parameter_sizes(
    model: Any, parallel: ParallelConfig, base: Mapping[str, str] = MappingProxyType({})
) -> Iterator[ParameterSize]:
    """Yields the size of every parameter of a model on the meta device, on one rank. In a pipeline, a tied head counts
    as a separate parameter. `base` holds the formats of weights kept quantized, by name."""
    tied = model.config.tie_word_embeddings
    plan = FAMILIES[model.config.model_type].whole_tp_plan(model.config.base_model_tp_plan)
    for name, parameter in model.named_parameters(remove_duplicate=not (tied and parallel.pp > 1)):
        shape, fsdp = list(parameter.shape), parallel.fsdp_size
        if ".experts." in name:
            shape[0] //= parallel.ep
            fsdp = parallel.expert_ranks // parallel.ep if parallel.ep > 1 else fsdp
        elif parallel.tp > 1:
            dim = _split_dim(name, plan)
            if dim is not None:
                shape[dim] //= parallel.tp
        layer = LAYER.match(name)
        number = int(layer.group(1)) if layer else None
        yield ParameterSize(name, number, tuple(shape), fsdp, parameter.requires_grad, base.get(name, ""))


STORED = {"nf4": "nf4", "mxfp4": "mxfp4", "fp8": "fp8_e4m3"}
"""Storage format of weights by the checkpoint's quantization."""


def formats_of_base(model: Any, lora: LoraConfig | None, quantization: str) -> dict[str, str]:
    """Returns the formats of weights kept quantized, by name, as far as config.json tells. `quantization` is that of
    the checkpoint."""
    if lora is None or lora.base == "plain":
        return {}
    if lora.base != "stored":
        return {of: lora.base for of, _ in names_of_base(model)}
    name, plain = STORED[quantization], _patterns_of_plain(model.config.to_dict())
    weights = names_of_base(model)
    of_base = [of for of, weight in weights if name != "mxfp4" or weight.ndim == 3]  # experts alone
    return {of: name for of in of_base if not any(pattern.search(of) for pattern in plain)}


PLAIN = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules")
"""Keys of quantization settings that list unquantized modules."""


def _patterns_of_plain(config: dict[str, Any]) -> list[re.Pattern[str]]:
    """Returns patterns of the weight names that config.json lists as unquantized, given as names with *, or as regular
    expressions after re:."""
    settings = config.get("quantization_config") or {}
    entries = [entry for key in PLAIN for entry in settings.get(key) or ()]
    bodies = [entry[3:] if entry.startswith("re:") else re.escape(entry).replace(r"\*", "[^.]*") for entry in entries]
    return [re.compile(rf"(?:^|\.)(?:{body})(?:\.|$)") for body in bodies]


def _split_dim(name: str, plan: dict[str, str]) -> int | None:
    """Returns the dim along which tensor parallelism splits a parameter; None if it does not."""
    module, _, kind = name.rpartition(".")
    if is_adapter(name):
        layer, _, side = module.rpartition(".")
        split = _split_dim(f"{layer}.weight", plan)
        return split if side == ("lora_A" if split == 1 else "lora_B") else None
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return 0
    dims = (split_dim(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", n.removeprefix("model."))), kind) for n in (module, name))
    return next((dim for dim in dims if dim is not None), None)


def split_dim(style: str | None, kind: str) -> int | None:
    """Returns the dim along which a module's weight or bias is split; None if it is not."""
    if style in (COLUMNS, BY_HEADS, WIDE_NORM):
        return 0
    return 1 if style == ROWS and kind == "weight" else None


def stage_parameters(sizes: list[ParameterSize], layers: tuple[int, ...]) -> list[list[ParameterSize]]:
    """Returns the parameters of each stage. The first stage has the embedding, the last one the final norm, head and
    MTP layer."""
    stage_of_layer = [stage for stage, count in enumerate(layers) for _ in range(count)]
    stage_of_layer.append(len(layers) - 1)  # the MTP layer
    stages: list[list[ParameterSize]] = [[] for _ in layers]
    for size in sizes:
        if size.layer is not None:
            stages[stage_of_layer[size.layer]].append(size)
        else:
            stages[0 if size.name.startswith("model.embed_tokens") else -1].append(size)
    return stages
