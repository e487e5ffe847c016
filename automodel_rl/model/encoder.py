"""An encoder of a multimodal model as a module of its own: media in, embeddings of the language model out.

All parts consist of transformers' own modules. `LanguagePart` has the names of a causal language model, so the rest of
the package treats it as one. An `EncoderPart` is what is left of the inner model without its language model and without
other encoders.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from automodel_rl.batch.media import EncoderName, Media
from automodel_rl.compat.modules import without_modules
from automodel_rl.config import ModelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.lora.add import Encoder
from automodel_rl.lora.layers import install_adapters
from automodel_rl.model.activation_checkpointing import checkpoint_layers
from automodel_rl.model.fused_norm import install_fused_norms
from automodel_rl.model.parallelise import dtypes_of, mixed_precision, store_frozen
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import Unit, wrap_fsdp
from automodel_rl.parallel.tensor_parallel import TensorParallel, split_linears
from automodel_rl.support.encoders import MULTIMODAL_FAMILIES, EncoderNames


class LanguagePart(nn.Module):
    """The language model of a multimodal model, with the names of a causal language model.

    Args:
        whole: transformers' model for conditional generation.
        config: the language model's config.
    """

    def __init__(self, whole: Any, config: PretrainedConfig):
        super().__init__()
        self.config, self.model, self.lm_head = config, whole.get_decoder(), whole.lm_head


class EncoderPart(nn.Module):
    """An encoder with its projector. Its forward is called through FSDP's hooks, a few images or clips at a time.

    Args:
        whole: transformers' model for conditional generation.

    Attributes:
        name: the component.
        one_by_one: whether a forward takes a single image or clip.
    """

    name: ClassVar[EncoderName]

    def __init__(self, whole: Any):
        super().__init__()
        self.config, self.one_by_one = whole.config, False
        inner = whole if whole.get_decoder() is whole.model else whole.model
        others = [n for n, _ in inner.named_children() if n not in self.names.modules]
        self.model: Any = without_modules(inner, others)

    @property
    def names(self) -> EncoderNames:
        """The names of its modules."""
        return MULTIMODAL_FAMILIES[self.config.model_type].encoders[self.name]

    def forward(self, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        """Embeddings of the tokens of all images or clips, in order.

        Args:
            loaded: what `Media.load` gives, on the device and in the compute dtype; of a single one if `one_by_one`.
            media: the images or clips.

        Returns:
            [m, H] in the compute dtype, or [m, (1 + D) * H] if features follow each embedding (batch/media.py).
        """
        raise NotImplementedError

    def blank(self) -> Media:
        """The smallest image or clip. A rank of the encoder without any encodes it to join its peers' collectives."""
        raise NotImplementedError

    def shape(self, item: Media) -> tuple[int, ...]:
        """The shape of what an image or clip of its size loads."""
        raise NotImplementedError

    def choose_attention(self, device: torch.device, dtype: torch.dtype) -> None:
        """Chooses the encoder's attention function, if there is a better one than sdpa."""


def as_encoder(part: EncoderPart) -> Encoder:
    """The encoder as adapters see it."""
    return Encoder(part, part.name, tuple(f"model.{name}" for name in part.names.projectors))


def freeze(language: LanguagePart, encoders: Mapping[str, EncoderPart], frozen: Sequence[str]) -> None:
    """Freezes the parts that `ModelConfig.frozen` names."""
    chosen = list(language.parameters()) if "language" in frozen else []
    for name, part in encoders.items():
        projector = {p for module in part.names.projectors for p in part.model.get_submodule(module).parameters()}
        chosen += list(projector) if "projector" in frozen else []
        chosen += [p for p in part.parameters() if p not in projector] if name in frozen else []
    for parameter in chosen:
        parameter.requires_grad_(False)


def parallelise_encoder(
    part: EncoderPart, layout: Layout, model: ModelConfig, memory: MemoryConfig
) -> list[tuple[nn.Module, str]]:
    """Lays out an encoder over ranks, in place: its linear layers over tp, the rest with FSDP.

    Args:
        part: the encoder, on the meta device except for its buffers.
        layout: the encoder's layout.
        model: the model's config, for its precision.
        memory: what is recomputed.

    Returns:
        Parameters, as (module, name), for which each tp rank's gradient is only a summand.
    """
    compute, _ = dtypes_of(model)
    store_frozen(part, compute)
    partial: list[tuple[nn.Module, str]] = []
    if layout.parallel.tp > 1:
        how = TensorParallel(layout.tp_group, sequence_parallel=False)
        partial = split_linears(part, part.names.tp_style, layout.mesh["tp"], how)
    install_adapters(part)
    part.choose_attention(layout.device, compute)
    install_fused_norms(part, [], layout.device, compute)
    layers = encoder_layers(part)
    checkpoint_layers(layers, memory.recomputed)
    # Ranks may have different numbers of images, so they cannot gather or reduce for each.
    policy = mixed_precision(model)
    wrap_fsdp([Unit(module, layout.fsdp_mesh, policy) for module in (*layers, part)], reshards=False)
    return partial


def encoder_layers(part: EncoderPart) -> list[Any]:
    """The layers of the encoder."""
    return [*max((module for module in part.modules() if isinstance(module, nn.ModuleList)), key=len)]
