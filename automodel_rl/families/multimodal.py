"""Multimodal families: encoders, language models, and the representation of media."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from automodel_rl.batch.media import EncoderName, RotaryGrid
from automodel_rl.families.encoder import EncoderFamily
from automodel_rl.families.family import Family
from automodel_rl.families.file_names import FileNames

TEXT_MODELS = ("llama", "mistral", "ministral3", "qwen2", "qwen3")
"""Text model families that serve as language models of published multimodal models."""


@dataclass(frozen=True, kw_only=True)
class Multimodal:
    """A multimodal family, by the `model_type` of the whole model.

    Attributes:
        encoders: supported encoder families by component, distinguished by `model_types`.
        file_names: tensor names in files: the usual ones, then alternatives.
        languages: text model families that its language model may belong to.
        own_languages: families of language models that cannot stand alone.
        left_out: config keys of encoders that are not trained. Their tensors are copied to exports.
        part_of: `model_type` of a model of which only this family is trained, and the key of its config there. All
            other tensors of such a checkpoint are copied to exports.
        has_rotary_grid: whether rotary positions in the language model follow an image's grid (M-RoPE,
            arXiv:2409.12191).
        text_follows_time: whether the text after a video continues from its largest position in time.
        interleaves_axes: whether rotary positions in time, height and width are interleaved in a head's dims.
        pads_media: whether the language model replaces every media token by a pad, also for per-layer embeddings.
        image_text: text that chat templates write for an image, and its replacement by the model's processor, with a
            single image token; None if templates write that token.
        has_peft_names: whether the layers of its parts have the same names in PEFT as in transformers' class.
    """

    encoders: dict[EncoderName, tuple[EncoderFamily, ...]]
    file_names: tuple[FileNames, ...]
    languages: tuple[str, ...] = ()
    own_languages: dict[str, Family] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    part_of: tuple[str, str] | None = None
    has_rotary_grid: bool = False
    text_follows_time: bool = False
    interleaves_axes: bool = False
    pads_media: bool = False
    image_text: tuple[str, str] | None = None
    has_peft_names: bool = True

    @property
    def known_languages(self) -> tuple[str, ...]:
        """All supported families of its language model."""
        return (*self.languages, *self.own_languages)

    def is_bidirectional(self, config: PretrainedConfig) -> bool:
        """Whether tokens of an image attend to each other in both directions in some layers of the language model."""
        of_all = (encoder for encoders in self.encoders.values() for encoder in encoders)
        return any(encoder.bidirectional(config) != "nowhere" for encoder in of_all)

    @property
    def reads_videos(self) -> bool:
        return any(encoder.reads_videos for encoders in self.encoders.values() for encoder in encoders)

    @property
    def has_pixel_limits(self) -> bool:
        return any(encoder.has_pixel_limits for encoders in self.encoders.values() for encoder in encoders)

    def model_types(self, component: EncoderName) -> tuple[str, ...]:
        """Returns the supported `model_type`s of an encoder's config."""
        return tuple(kind for encoder in self.encoders[component] for kind in encoder.model_types)

    def encoder(self, config: PretrainedConfig, component: EncoderName) -> EncoderFamily:
        """Returns the family of a model's encoder, which must be supported."""
        kind = encoder_config(config, component).model_type
        return next(encoder for encoder in self.encoders[component] if kind in encoder.model_types)

    def rotary_grid(self, config: PretrainedConfig) -> RotaryGrid | None:
        """Returns how rotary positions follow the grids of images; None if they do not."""
        if not self.has_rotary_grid:
            return None
        return RotaryGrid(config.vision_config.spatial_merge_size, self.text_follows_time)


def encoder_config(config: PretrainedConfig, component: str) -> Any:
    """Returns the config of the encoder "vision" or "audio"."""
    return config.vision_config if component == "vision" else config.audio_config
