"""All known families, and lookup of the family of a config.

Unless stated otherwise, `config` is that of the whole model.
"""

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from automodel_rl.errors import InputError
from automodel_rl.families.classifier import HEAD_IN_FILES, HEAD_IN_MODEL, is_classifier
from automodel_rl.families.encoder import EncoderFamily
from automodel_rl.families.family import Family
from automodel_rl.families.file_names import (
    NAMES_BY_CONFIG,
    SINGLE_EXPERTS,
    TEXT_FILE_NAMES,
    FileNames,
    in_multimodal,
    with_mtp,
)
from automodel_rl.families.gemma3 import GEMMA3
from automodel_rl.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from automodel_rl.families.glm4v import GLM4V, GLM4V_MOE
from automodel_rl.families.internvl import INTERNVL
from automodel_rl.families.llava import LLAVA
from automodel_rl.families.mistral3 import MISTRAL3
from automodel_rl.families.multimodal import Multimodal
from automodel_rl.families.qwen2_5_omni import QWEN2_5_OMNI
from automodel_rl.families.qwen2_5_vl import QWEN2_5_VL
from automodel_rl.families.qwen2_audio import QWEN2_AUDIO
from automodel_rl.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from automodel_rl.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from automodel_rl.families.text import TEXT_FAMILIES

MULTIMODAL_FAMILIES = {
    "llava": LLAVA,
    "gemma3": GEMMA3,
    "mistral3": MISTRAL3,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "glm4v": GLM4V,
    "glm4v_moe": GLM4V_MOE,
    "internvl": INTERNVL,
    "gemma4": GEMMA4,
    "gemma4_unified": GEMMA4_UNIFIED,
    "qwen2_audio": QWEN2_AUDIO,
    "qwen2_5_omni_thinker": QWEN2_5_OMNI,
}
"""Multimodal families by the `model_type` of the whole model."""

FAMILIES: dict[str, Family] = TEXT_FAMILIES | {
    name: family for whole in MULTIMODAL_FAMILIES.values() for name, family in whole.own_languages.items()
}
"""Families of language models, stand-alone or part of a multimodal model, by the `model_type` of their config."""

TEXT = "text_config"
"""Key of the language model's config in that of a multimodal model."""

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""`model_type`s that are other names of a family, which transformers opens only with code of the checkpoint. Exports
use the family's own name."""

COMPOSITES = {
    "kimi_k25": TEXT,
    **dict(whole.part_of for whole in MULTIMODAL_FAMILIES.values() if whole.part_of is not None),
}
"""Models of which only a part is trained, by `model_type`, with the key of that part's config. All other tensors are
copied to exports unchanged."""


@dataclass(frozen=True)
class CheckpointFamily:
    """The family of a checkpoint and the tensor names in its files.

    Attributes:
        name: `model_type` of the whole model.
        language: facts about its language model's family.
        file_names: tensor names in its files.
        is_classifier: whether it has a linear head rather than the vocabulary's.
    """

    name: str
    language: Family
    file_names: FileNames
    is_classifier: bool = False

    @property
    def is_multimodal(self) -> bool:
        """Whether the model has encoders."""
        return self.name in MULTIMODAL_FAMILIES


def checkpoint_family(config: PretrainedConfig, names: Iterable[str] = ()) -> CheckpointFamily:
    """Returns the family of a checkpoint. `names` are the tensor names in its files; without them, the usual naming is
    assumed."""
    name, language = config.model_type, language_family(config)
    if name in MULTIMODAL_FAMILIES:
        known = MULTIMODAL_FAMILIES[name].file_names
    else:
        plain = (SINGLE_EXPERTS if language.is_moe else FileNames(),)
        usual = NAMES_BY_CONFIG[name](config) if name in NAMES_BY_CONFIG else TEXT_FILE_NAMES.get(name, plain)
        known = (*usual, *in_multimodal(usual))
    found = list(names)
    file_names = next((k for k in reversed(known) if k.fits(found)), known[0])
    if language.mtp_files:
        file_names = with_mtp(file_names, language_config(config).num_hidden_layers, language.mtp_files)
    if is_classifier(config):
        renamed = ((rf"^{re.escape(HEAD_IN_MODEL)}$", HEAD_IN_FILES), *file_names.renamed)
        file_names = replace(file_names, renamed=renamed)
    return CheckpointFamily(name, language, file_names, is_classifier(config))


def multimodal_family(config: PretrainedConfig) -> Multimodal | None:
    """Returns the multimodal family of a model; None for text-only models."""
    return MULTIMODAL_FAMILIES.get(config.model_type)


def left_out(config: PretrainedConfig) -> tuple[str, ...]:
    """Returns the config keys of encoders that are not trained."""
    family = multimodal_family(config)
    return () if family is None else family.left_out


def encoder_families(config: PretrainedConfig) -> dict[str, EncoderFamily]:
    """Returns the families of a model's encoders by component; {} for text-only models."""
    family = multimodal_family(config)
    return {} if family is None else {name: family.encoder(config, name) for name in family.encoders}


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of the language model, which is `config` itself for text-only models."""
    if multimodal_family(config) is None:
        return config
    language = copy.deepcopy(config.text_config)
    language.tie_word_embeddings = config.tie_word_embeddings
    return language


def text_model_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of a multimodal model's language model as a stand-alone model. Raises InputError if there is
    none."""
    if multimodal_family(config) is None:
        raise InputError(f"model.text_only: a {config.model_type!r} model reads text only: remove it")
    language = language_config(config)
    if language.model_type not in TEXT_FAMILIES:
        raise InputError(
            f"model.text_only: {language.model_type!r}, the language model of {config.model_type!r}, is not a "
            "standalone model: remove it, and freeze the encoders with model.frozen"
        )
    return language


def language_family(config: PretrainedConfig) -> Family:
    """Returns the family of a model's language model, which must be known."""
    return FAMILIES[(config if multimodal_family(config) is None else config.text_config).model_type]


def num_deepstack(config: PretrainedConfig) -> int:
    """Returns the number of initial language-model layers after which features of earlier encoder layers are added to
    image tokens (DeepStack, arXiv:2406.04334); usually 0."""
    return sum(encoder.num_deepstack(config) for encoder in encoder_families(config).values())


def padded_ids(config: PretrainedConfig) -> tuple[int, ...]:
    """Returns media tokens that the language model replaces by pads wherever they occur."""
    family = multimodal_family(config)
    keys = () if family is None or not family.pads_media else ("image_token_id", "video_token_id", "audio_token_id")
    return tuple(token for key in keys if (token := vars(config)[key]) is not None)


def is_exact(config: PretrainedConfig, tp: int) -> bool:
    """Whether a float64 model computes entirely in float64, rather than rounding to fp32 in places like transformers.
    `tp` is the number of ranks that split the language model's layers."""
    in_fp32 = any(encoder.computes_in_fp32 for encoder in encoder_families(config).values())
    return not in_fp32 and language_family(config).is_exact(tp)
