"""Memory of one rank of a multimodal model's encoder in a training step.

An encoder that shares ranks with the language model encodes all media of a step before the language model's
schedule, and its activations stay until the schedule ends. An encoder on separate ranks keeps the activations of the
microbatches that it has encoded ahead. The temporary memory of one layer's backward is not counted.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig

from automodel_rl.compat.modules import set_attention
from automodel_rl.config import ComponentsConfig, ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.components import EncoderComponent
from automodel_rl.config.model import MemoryConfig
from automodel_rl.estimate.activations import META, LiveBytes, attention_stand_in, stand_in_norms
from automodel_rl.estimate.parameter_sizes import ParameterSize, empty_parts, split_dim
from automodel_rl.families.multimodal import encoder_config
from automodel_rl.model.activation_checkpointing import checkpoint_layers
from automodel_rl.model.encoder import EncoderPart, encoder_layers
from automodel_rl.model.parallelise import dtypes_of
from automodel_rl.optimizers import OPTIMIZERS
from automodel_rl.parallel.pipeline.schedules import fill_up_to
from automodel_rl.parallel.pipeline.timeline import encoded_ahead
from automodel_rl.tools.plan.packing import PlannedPacking, microbatches

STAND_IN = "automodel_rl_plan_flash"
"""Name of the attention stand-in. It contains "flash" so that encoders process all media in one call
(model/varlen.py)."""


@dataclass(frozen=True)
class EncoderMemory:
    """Bytes on the fullest encoder rank.

    Attributes:
        parameters: parameter count of the whole encoder, not bytes.
        weights: master copies of its shards.
        moments: optimizer moments of the trained shards.
        gathered: whole weights in the compute dtype.
        gradients: whole gradients in the gradient dtype.
        activations: kept until the language model's schedule ends.
    """

    parameters: int
    weights: int
    moments: int
    gathered: int
    gradients: int
    activations: int

    @property
    def peak(self) -> int:
        return self.weights + self.moments + self.gathered + self.gradients + self.activations


def plan_encoders(
    config: PretrainedConfig,
    model: ModelConfig,
    memory: MemoryConfig,
    components: ComponentsConfig,
    packing: PlannedPacking,
    optimizer: OptimizerConfig,
) -> dict[str, EncoderMemory]:
    """Returns the memory of each encoder on its fullest rank.

    Args:
        config: config of the whole model.
        components: the layout.
        packing: the step's microbatches and media positions.
    """
    AttentionInterface.register(STAND_IN, functools.partial(attention_stand_in, ParallelConfig()))
    count = microbatches(packing, components.language.parallel)
    found = {}
    for name, component in components.encoders.items():
        _, *parts = empty_parts(config, dtypes_of(model).compute, model)
        part = next(part for part in parts if part.name == name)
        share = min(count, _ahead(components, name, count)) / count / component.parallel.num_data_ranks
        kept = math.ceil(packing.positions.get(name, 0) * share)
        found[name] = _memory_of(part, model, memory, component, kept, optimizer)
    return found


def _ahead(components: ComponentsConfig, name: str, count: int) -> int:
    """Number of microbatches whose activations an encoder keeps at once."""
    language = components.language.parallel
    if components.is_colocated(name):
        return count
    return encoded_ahead(language, fill_up_to(count, language) if language.pp > 1 else count)


def _memory_of(
    part: EncoderPart,
    model: ModelConfig,
    memory: MemoryConfig,
    component: EncoderComponent,
    positions: int,
    optimizer: OptimizerConfig,
) -> EncoderMemory:
    """Returns the memory of a rank with an encoder that keeps the activations of `positions` positions at once."""
    compute, master, gradient = dtypes_of(model)
    sizes = [_size(part, name, p, component) for name, p in part.named_parameters()]
    trained = [size for size in sizes if size.is_trained]
    states = OPTIMIZERS[optimizer.name].state_names(part)
    of_value = {size.name: states[size.name].value_bytes(gradient, size.shape) for size in trained}
    moments = round(sum(size.largest_shard * of_value[size.name] for size in trained))
    return EncoderMemory(
        parameters=sum(parameter.numel() for parameter in part.parameters()),
        weights=sum(size.largest_shard for size in sizes) * master.itemsize,
        moments=0 if memory.offloads_optimizer else moments,
        gathered=sum(size.gathered for size in sizes) * compute.itemsize,
        gradients=sum(size.gathered for size in trained) * gradient.itemsize,
        activations=0 if not positions or not _is_kept(part) else _kept(part, positions, memory, compute),
    )


def _is_kept(part: EncoderPart) -> bool:
    return any(parameter.requires_grad for layer in encoder_layers(part) for parameter in layer.parameters())


def _size(part: EncoderPart, name: str, parameter: nn.Parameter, component: EncoderComponent) -> ParameterSize:
    module, _, kind = name.rpartition(".")
    shape = list(parameter.shape)
    dim = split_dim(part.family.tp_style(module), kind)
    if dim is not None:
        shape[dim] //= component.tp
    return ParameterSize(name, None, tuple(shape), component.dp_shard, parameter.requires_grad)


def _kept(part: EncoderPart, positions: int, memory: MemoryConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of activations that the encoder's layers keep for `positions` positions. Ignores tensor
    parallelism."""
    layers = encoder_layers(part)
    layer: Any = layers[0]
    config = encoder_config(part.config, part.name)
    set_attention(config, STAND_IN)
    values = config.to_dict()
    width = values.get("hidden_size") or values["d_model"]
    stand_in_norms(layer)
    checkpoint_layers([layer], memory.recomputed)
    hidden = torch.empty(positions, width, dtype=dtype, device=META, requires_grad=True)
    with LiveBytes() as live:
        output = part.family.layer_output(layer, hidden, part.config)
        kept = live.now
    del output
    return len(layers) * kept
