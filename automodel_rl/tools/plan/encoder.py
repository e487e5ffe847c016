"""Memory of one rank of a vision-language model's encoder in one training step.

Where both components share ranks, all images of a step are encoded before the language model's schedule, and their
activations are kept until its end, beside the language model's. An encoder on ranks of its own keeps those of the
microbatches that it has encoded ahead. The extra memory of one layer's backward is left out.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig

from automodel_rl.compat.modules import set_attention
from automodel_rl.config import ComponentsConfig, ModelConfig, OptimizerConfig
from automodel_rl.config.components import VisionComponent
from automodel_rl.config.model import MemoryConfig
from automodel_rl.estimate.activations import META, LiveBytes, attention_stand_in, stand_in_norms
from automodel_rl.estimate.parameter_sizes import ParameterSize, empty_parts, split_dim
from automodel_rl.model.activation_checkpointing import checkpoint_layers
from automodel_rl.model.parallelise import dtypes_of
from automodel_rl.model.vision import VisionPart, encoder_layers, split_part
from automodel_rl.optimizers import OPTIMIZERS
from automodel_rl.parallel.pipeline.schedules import fill_up_to
from automodel_rl.parallel.pipeline.timeline import encoded_ahead
from automodel_rl.support.description import ImageForm, image_form
from automodel_rl.support.families import VISION_FAMILIES
from automodel_rl.tools.plan.packing import Packing, microbatches

STAND_IN = "automodel_rl_plan_flash"
"""Name of the attention stand-in. It contains "flash", so encoders pass all images in one call (model/vision.py)."""


@dataclass(frozen=True)
class EncoderMemory:
    """Bytes on the fullest encoder rank.

    Attributes:
        parameters: number of the parameters of the whole encoder, not bytes.
        weights: master copies of its shards.
        moments: the optimizer's moments of the trained shards.
        gathered: whole weights in the compute dtype.
        gradients: whole gradients in the master dtype.
        activations: activations of its images, kept until the language model's schedule is done.
    """

    parameters: int
    weights: int
    moments: int
    gathered: int
    gradients: int
    activations: int

    @property
    def peak(self) -> int:
        """The most memory in use at one time."""
        return self.weights + self.moments + self.gathered + self.gradients + self.activations


def plan_encoder(
    config: PretrainedConfig,
    model: ModelConfig,
    memory: MemoryConfig,
    components: ComponentsConfig,
    packing: Packing,
    optimizer: OptimizerConfig,
) -> EncoderMemory:
    """The memory that the fullest encoder rank needs.

    Args:
        config: the whole model's config.
        model: the config section with its precision and what is frozen.
        memory: the config section on recomputation and offloading.
        components: the layout.
        packing: the microbatches of a step, and the patches of their images.
        optimizer: the optimizer's config.
    """
    AttentionInterface.register(STAND_IN, functools.partial(attention_stand_in, 1))
    patches, count = packing.patches or 0, microbatches(packing, components.language.parallel)
    found = []
    for stage in range(components.vision.pp):
        _, part = empty_parts(config, dtypes_of(model)[0], model)
        split_part(part, dtypes_of(model)[0], stage, components.vision.pp)
        ahead = _ahead(components, count) + components.vision.pp - 1 - stage
        share = min(count, ahead) / count / components.vision.parallel.num_data_ranks
        found.append(_of_stage(part, model, memory, components.vision, math.ceil(patches * share), optimizer))
    fullest = max(found, key=lambda of_stage: of_stage.peak)
    return replace(fullest, parameters=sum(of_stage.parameters for of_stage in found))


def _ahead(components: ComponentsConfig, count: int) -> int:
    """Number of microbatches whose activations the encoder's last stage keeps at once."""
    language = components.language.parallel
    if components.is_colocated:
        return count
    return encoded_ahead(language, fill_up_to(count, language) if language.pp > 1 else count)


def _of_stage(
    part: VisionPart,
    model: ModelConfig,
    memory: MemoryConfig,
    vision: VisionComponent,
    patches: int,
    optimizer: OptimizerConfig,
) -> EncoderMemory:
    """The memory that a rank with one stage of an encoder needs.

    Args:
        part: the stage.
        model, memory, optimizer: as in `plan_encoder`.
        vision: the encoder's layout.
        patches: number of patches of the images whose activations it keeps at once.
    """
    compute, master = dtypes_of(model)
    sizes = [_size(part.config, name, p, vision.tp, vision.dp_shard) for name, p in part.named_parameters()]
    trained = [size for size in sizes if size.is_trained]
    states = OPTIMIZERS[optimizer.name].state_names(part)
    moments = sum(size.largest_shard * len(states[size.name].moments) for size in trained)
    return EncoderMemory(
        parameters=sum(parameter.numel() for parameter in part.parameters()),
        weights=sum(size.largest_shard for size in sizes) * master.itemsize,
        moments=0 if memory.offload_optimizer else moments * master.itemsize,
        gathered=sum(size.gathered for size in sizes) * compute.itemsize,
        gradients=sum(size.gathered for size in trained) * master.itemsize,
        activations=0 if not patches or not _is_kept(part) else _kept(part, patches, memory, compute),
    )


def _is_kept(part: VisionPart) -> bool:
    """Whether a backward goes through the encoder's layers."""
    return any(parameter.requires_grad for layer in encoder_layers(part) for parameter in layer.parameters())


def _size(config: PretrainedConfig, name: str, parameter: nn.Parameter, tp: int, dp_shard: int) -> ParameterSize:
    """The size of an encoder's parameter on one rank."""
    module, _, kind = name.rpartition(".")
    shape = list(parameter.shape)
    dim = split_dim(VISION_FAMILIES[config.model_type].tp_style(module), kind)
    if dim is not None:
        shape[dim] //= tp
    return ParameterSize(name, None, tuple(shape), dp_shard, parameter.requires_grad)


def _kept(part: VisionPart, patches: int, memory: MemoryConfig, dtype: torch.dtype) -> int:
    """Bytes that the encoder's layers keep for so many patches until their backward. Ignores that tp splits some."""
    layers = encoder_layers(part)
    layer: Any = layers[0]
    set_attention(part.config.vision_config, STAND_IN)
    vision = part.config.vision_config.to_dict()
    width, heads = vision["hidden_size"], vision.get("num_heads") or vision["num_attention_heads"]
    stand_in_norms(layer)
    checkpoint_layers([layer], memory.activation_checkpointing)
    hidden = torch.empty(patches, width, dtype=dtype, device=META, requires_grad=True)
    with LiveBytes() as live:
        form = image_form(part.config)
        turns = torch.empty(patches, width // heads, device=META)
        if form is ImageForm.PATCHES:
            bounds = torch.empty(2, dtype=torch.int32, device=META)
            output = layer(hidden, cu_seqlens=bounds, max_seqlen=patches, position_embeddings=(turns, turns))
        elif form is ImageForm.ANY_SIZE:
            output = layer(hidden[None], attention_mask=None, position_embeddings=(turns, turns))
        else:
            output = layer(hidden[None], attention_mask=None)
        kept = live.now
    del output
    return len(layers) * kept
