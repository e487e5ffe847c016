"""An encoder of a multimodal model as a module of its own: media in, embeddings of the language model out.

All parts consist of transformers' own modules. `LanguagePart` has the names of a causal language model, so the rest
of the package treats it as one. An `EncoderPart` is the inner model without its language model and other encoders.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from automodel_rl.batch.media import EncoderName, Media
from automodel_rl.compat.modules import without_modules
from automodel_rl.config import ModelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.families.known import encoder_families, language_config, multimodal_family
from automodel_rl.lora.add import Encoder
from automodel_rl.lora.layers import install_adapters
from automodel_rl.model.activation_checkpointing import checkpoint_layers
from automodel_rl.model.fused_norm import install_fused_norms
from automodel_rl.model.parallelise import dtypes_of, layers_precision, store_weights
from automodel_rl.model.varlen import choose_varlen
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import Unit, wrap_fsdp
from automodel_rl.parallel.tensor_parallel import TensorParallel, split_linears


class LanguagePart(nn.Module):
    """The language model of a multimodal model, with the names of a causal language model."""

    def __init__(self, whole: Any, config: PretrainedConfig):
        super().__init__()
        self.config, self.model, self.lm_head = config, whole.get_decoder(), whole.lm_head


class EncoderPart(nn.Module):
    """An encoder with its projector. Its forward runs through FSDP's hooks, a few media at a time."""

    def __init__(self, whole: Any, name: EncoderName):
        super().__init__()
        self.config, self.name = whole.config, name
        self.family = encoder_families(whole.config)[name]
        inner = whole if whole.get_decoder() is whole.model else whole.model
        others = [n for n, _ in inner.named_children() if n not in self.family.modules]
        self.model: Any = without_modules(inner, others)

    def forward(self, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        """Embeds the tokens of all images or clips, in order.

        Args:
            loaded: results of `Media.load`, on the device and in the compute dtype; a single one if the family
                `is_unbatched`.

        Returns:
            [m, H] in the compute dtype, or [m, (1 + D) * H] if features follow each embedding (batch/media.py).
        """
        return self.family.encode(self.model, self.config, loaded, media)

    def blank(self) -> Media:
        """Returns the smallest image or clip, which a rank without media encodes to join its peers' collectives."""
        return self.family.blank(self.config)

    def shape(self, item: Media) -> tuple[int, ...]:
        """Returns the shape of the loaded tensor for media of this size."""
        return self.family.shape(self.config, item)


def language_model(whole: Any) -> Any:
    """Returns the model itself if it is a causal language model, else its language model under the same names."""
    if multimodal_family(whole.config) is None:
        return whole
    return LanguagePart(whole, language_config(whole.config))


def split_modules(whole: Any, config: PretrainedConfig) -> tuple[LanguagePart, dict[str, EncoderPart]]:
    """Splits a multimodal model into its parts, which share no weight: the language model, and encoders by
    component."""
    names = (family.component for family in encoder_families(whole.config).values())
    return LanguagePart(whole, config), {name: EncoderPart(whole, name) for name in names}


def as_encoder(part: EncoderPart) -> Encoder:
    """Describes the encoder for adapters."""
    return Encoder(part, part.name, tuple(f"model.{name}" for name in part.family.projectors))


def freeze(language: LanguagePart, encoders: Mapping[str, EncoderPart], frozen: Sequence[str]) -> None:
    """Freezes the parts named in `ModelConfig.frozen`."""
    chosen = list(language.parameters()) if "language" in frozen else []
    for name, part in encoders.items():
        projector = {p for module in part.family.projectors for p in part.model.get_submodule(module).parameters()}
        chosen += list(projector) if "projector" in frozen else []
        chosen += [p for p in part.parameters() if p not in projector] if name in frozen else []
    for parameter in chosen:
        parameter.requires_grad_(False)


def parallelise_encoder(
    part: EncoderPart, layout: Layout, model: ModelConfig, memory: MemoryConfig
) -> list[tuple[nn.Module, str]]:
    """Lays out an encoder over ranks in place: linear layers over tp, the rest with FSDP.

    Returns:
        Parameters, as (module, name), whose gradient on each tp rank is only a summand.
    """
    dtypes = dtypes_of(model)
    compute = dtypes.compute
    store_weights(part, dtypes)
    partial: list[tuple[nn.Module, str]] = []
    if layout.parallel.tp > 1:
        how = TensorParallel(layout.tp_group, sequence_parallel=False)
        partial = split_linears(part, part.family.tp_style, layout.mesh["tp"], how)
    install_adapters(part)
    if part.family.varlen_module:
        choose_varlen(part.model.get_submodule(part.family.varlen_module).config, layout.device, compute)
    install_fused_norms(part, [], layout.device, compute)
    layers = encoder_layers(part)
    checkpoint_layers(layers, memory.recomputed)
    # Ranks may have different numbers of images, so gathers and reductions cannot be per image.
    policy = layers_precision(model)
    wrap_fsdp([Unit(module, layout.fsdp_mesh, policy) for module in (*layers, part)], reshards=False)
    return partial


def encoder_layers(part: EncoderPart) -> list[Any]:
    """Returns the encoder's layers; none if it is only a projection."""
    stacks = (module for module in part.modules() if isinstance(module, nn.ModuleList))
    return [*max(stacks, key=len, default=[])]
