"""A multimodal family: its encoders, its language models, and how media stand in them."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from automodel_rl.batch.media import EncoderName, RotaryGrid
from automodel_rl.families.encoder import EncoderFamily
from automodel_rl.families.family import Family
from automodel_rl.families.file_names import FileNames

TEXT_MODELS = ("llama", "mistral", "ministral3", "qwen2", "qwen3")
"""Families of text models that published multimodal models have as their language model."""


@dataclass(frozen=True, kw_only=True)
class Multimodal:
    """A multimodal family, by the `model_type` of the whole model.

    Attributes:
        encoders: by component, the families of encoders that it may have. Their `model_types` tell them apart.
        file_names: how files name its tensors: the usual names, then those that some files have.
        languages: families of text models that its language model may be.
        own_languages: language models that are no models of their own, with their facts.
        left_out: keys of the config with those of encoders that are not trained. Their tensors are copied to exports.
        part_of: the `model_type` of a model of which only this family is trained, and the key of its config there. All
            other tensors of such a checkpoint are copied to exports.
        has_rotary_grid: whether rotary positions in the language model follow an image's grid (M-RoPE,
            arXiv:2409.12191).
        text_follows_time: whether the text after a video goes on from its largest position in time.
        interleaves_axes: whether rotary positions in time, height and width take turns in a head's dims.
        pads_media: whether the language model takes a pad in place of every token of media, for embeddings of layers,
            too.
        image_text: what chat templates write for an image, and what the model's processor puts in its place, with a
            single image token; None if templates write that token.
        has_peft_names: whether PEFT names the layers of its parts as transformers' class does.
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
        """All families that its language model may be of."""
        return (*self.languages, *self.own_languages)

    def is_bidirectional(self, config: PretrainedConfig) -> bool:
        """Whether tokens of an image see each other both ways in layers of the language model.

        Args:
            config: the config of the whole model.
        """
        of_all = (encoder for encoders in self.encoders.values() for encoder in encoders)
        return any(encoder.both_ways(config) != "nowhere" for encoder in of_all)

    @property
    def reads_videos(self) -> bool:
        """Whether it reads videos."""
        return any(encoder.reads_videos for encoders in self.encoders.values() for encoder in encoders)

    @property
    def has_pixel_limits(self) -> bool:
        """Whether its image processor has limits for the pixels of an image."""
        return any(encoder.has_pixel_limits for encoders in self.encoders.values() for encoder in encoders)

    def model_types(self, component: EncoderName) -> tuple[str, ...]:
        """The `model_type`s that an encoder's config may have."""
        return tuple(kind for encoder in self.encoders[component] for kind in encoder.model_types)

    def encoder(self, config: PretrainedConfig, component: EncoderName) -> EncoderFamily:
        """The family of a model's encoder, which the table supports.

        Args:
            config: the config of the whole model.
            component: the encoder's component, "vision" or "audio".
        """
        kind = encoder_config(config, component).model_type
        return next(encoder for encoder in self.encoders[component] if kind in encoder.model_types)

    def rotary_grid(self, config: PretrainedConfig) -> RotaryGrid | None:
        """How rotary positions follow the grids of images; None if they do not.

        Args:
            config: the config of the whole model.
        """
        if not self.has_rotary_grid:
            return None
        return RotaryGrid(config.vision_config.spatial_merge_size, self.text_follows_time)


def encoder_config(config: PretrainedConfig, component: str) -> Any:
    """The config of one encoder.

    Args:
        config: the config of the whole model.
        component: the encoder's component, "vision" or "audio".
    """
    return config.vision_config if component == "vision" else config.audio_config
