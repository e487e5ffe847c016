"""Divides transformers' multimodal models into a language model and encoders."""

import math
from typing import Any

from transformers import PretrainedConfig

from automodel_rl.batch import Image, Media
from automodel_rl.model.audio import AudioPart, num_audio_positions
from automodel_rl.model.encoder import EncoderPart, LanguagePart
from automodel_rl.model.vision import VisionPart
from automodel_rl.support.description import language_config
from automodel_rl.support.encoders import MULTIMODAL_FAMILIES

PARTS: dict[str, type[EncoderPart]] = {part.name: part for part in (VisionPart, AudioPart)}
"""The class of each component's part."""


def language_model(whole: Any) -> Any:
    """The language model of transformers' model for conditional generation, with the names of a causal language model;
    a causal language model itself."""
    if whole.config.model_type not in MULTIMODAL_FAMILIES:
        return whole
    return LanguagePart(whole, language_config(whole.config))


def split_modules(whole: Any, config: PretrainedConfig) -> tuple[LanguagePart, dict[str, EncoderPart]]:
    """The parts of a multimodal model, which share no weight: the language model, and the encoders by component.

    Args:
        whole: transformers' model for conditional generation; may be without storage.
        config: the language model's config.
    """
    names = MULTIMODAL_FAMILIES[whole.config.model_type].encoders
    return LanguagePart(whole, config), {name: PARTS[name](whole) for name in names}


def num_positions(config: PretrainedConfig, item: Media) -> int:
    """Number of positions that an image or clip takes in the layers of its encoder.

    Args:
        config: the config of the whole model.
        item: the image or clip.
    """
    return math.prod(item.grid) if isinstance(item, Image) else num_audio_positions(config, item.num_frames)
