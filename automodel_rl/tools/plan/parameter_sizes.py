"""Sizes of a model's tensors on a layout, from its config alone: no weights, no process groups."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from automodel_rl.config import ParallelConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.model.lora import add_adapters
from automodel_rl.parallel.tensor_parallel import COLUMNS, ROWS

LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ParameterSize:
    """One parameter.

    Attributes:
        name: in the model.
        layer: its number, None for embedding, final norm and head.
        shape: that FSDP shards.
        fsdp_size: over how many ranks.
        is_trained: False for what adapters leave frozen.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    fsdp_size: int
    is_trained: bool

    @property
    def gathered(self) -> int:
        """Elements on a rank while a step runs."""
        return prod(self.shape)

    @property
    def largest_shard(self) -> int:
        """Elements that the first rank of an FSDP group keeps; no rank keeps more."""
        return -(-self.shape[0] // self.fsdp_size) * prod(self.shape[1:])


def empty_model(config: PretrainedConfig, dtype: torch.dtype, lora: LoraConfig | None) -> PreTrainedModel:
    """The model on the meta device, with adapters if there are to be some."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if lora is not None:
        add_adapters(model, lora)
    return model


def parameter_sizes(model: PreTrainedModel, parallel: ParallelConfig) -> Iterator[ParameterSize]:
    """Every parameter as one rank sees it; a tied head of its own where a pipeline needs one."""
    tied = model.config.tie_word_embeddings
    plan = model.config.base_model_tp_plan or {}
    for name, parameter in model.named_parameters(remove_duplicate=not (tied and parallel.pp > 1)):
        shape, fsdp = list(parameter.shape), parallel.fsdp_size
        if ".experts." in name:
            shape[0] //= parallel.ep
            fsdp //= parallel.ep
        elif parallel.tp > 1:
            dim = _split_dim(name, plan)
            if dim is not None:
                shape[dim] //= parallel.tp
        layer = LAYER.match(name)
        yield ParameterSize(name, int(layer.group(1)) if layer else None, tuple(shape), fsdp, parameter.requires_grad)


def _split_dim(name: str, plan: dict[str, str]) -> int | None:
    """Along which dim tensor parallelism cuts a parameter, None if not."""
    module, _, kind = name.rpartition(".")
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return 0
    style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", module.removeprefix("model.")))
    if style == COLUMNS:
        return 0
    return 1 if style == ROWS and kind == "weight" else None


def stage_parameters(sizes: list[ParameterSize], layers: tuple[int, ...]) -> list[list[ParameterSize]]:
    """Parameters of every stage: its layers, the embedding in the first, final norm and head in the last."""
    stage_of_layer = [stage for stage, count in enumerate(layers) for _ in range(count)]
    stages: list[list[ParameterSize]] = [[] for _ in layers]
    for size in sizes:
        if size.layer is not None:
            stages[stage_of_layer[size.layer]].append(size)
        else:
            stages[0 if size.name.startswith("model.embed_tokens") else -1].append(size)
    return stages
