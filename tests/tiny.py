"""Tiny models and data, made at run time."""

import re
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    Gemma3Config,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    InternVLConfig,
    LlavaConfig,
    Mistral3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5OmniThinkerConfig,
    Qwen2AudioConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from automodel_rl.batch import TokenSequence
from automodel_rl.tools.verify import comparison
from automodel_rl.tools.verify.small_model import draw_buffers
from tests.tiny_families import DENSE, GROUPED, SIZES, VOCAB, of_layers


def tiny_config(family: str, num_layers: int = 2, **sizes: object) -> PretrainedConfig:
    """The config of a tiny text model, with other sizes if asked."""
    return AutoConfig.for_model(family, **{**of_layers(SIZES[family], num_layers), **sizes})


NOT_COMPUTED_WITH = re.compile(
    r"drop|initializer|coef|jitter|_dt_|a_log|time_step_(min|max|floor)|block_ffn|partial_ro"
)
"""Numbers of configs that a forward in training does not use, or that decide on shapes."""

UNUSUAL = {"eps": 0.02, "norm_min": 0.9, "time_step_limit": (0.4, 0.9)}
"""Values for numbers whose names have these parts, where a factor would change nothing that shows."""


def unusual(name: str, value: object) -> object:
    """A value of a config's entry that no model has: numbers that are no integers are others."""
    if isinstance(value, dict):
        return {key: unusual(str(key), of_key) for key, of_key in value.items()}
    found = next((of_part for part, of_part in UNUSUAL.items() if part in name), None)
    if NOT_COMPUTED_WITH.search(name):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(number, float) for number in value):
        return found or [1.2 * number for number in value]
    if isinstance(value, float):
        return found or 1.2 * value
    return value


def save_tiny_model(
    folder: Path,
    family: str = "qwen3",
    *,
    tied: bool = False,
    num_layers: int = 4,
    dtype: torch.dtype = torch.float64,
    has_unusual_numbers: bool = False,
    **sizes: object,
) -> None:
    """A checkpoint with livelier weights than the default initialisation, so that differences show.

    Args:
        folder: is made.
        family: of the model.
        tied: whether embedding and head share their weight.
        num_layers: of the model.
        dtype: of the files.
        has_unusual_numbers: whether every number of the config that is no size has a value that no model has.
        sizes: other entries of the config.
    """
    config = tiny_config(family, num_layers, tie_word_embeddings=tied, **sizes)
    if has_unusual_numbers:
        for name, value in config.to_dict().items():
            if (other := unusual(name, value)) != value:
                setattr(config, name, other)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    save_lively(model, folder, dtype, plain_norms="gemma" not in family)


def save_lively(model: PreTrainedModel, folder: Path, dtype: torch.dtype, plain_norms: bool) -> None:
    """Saves a model with large random weights. Weights of norms are around 1, or around 0 if the norm adds 1."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1, generator=generator)
        elif "norm" in name and not plain_norms:
            nn.init.uniform_(parameter, -0.2, 0.2, generator=generator)
        else:
            nn.init.uniform_(parameter, 0.8, 1.2, generator=generator)
    draw_buffers(model, generator)
    model.to(dtype).save_pretrained(folder)


def make_sequences(num_sequences: int, seed: int, longest: int = 18) -> list[TokenSequence]:
    """Random sequences of different lengths with random loss masks, at least one trained token in each."""
    return comparison.make_sequences(num_sequences, seed, VOCAB, longest)


_QWEN_IDS = {
    "image_token_id": VOCAB - 1,
    "video_token_id": VOCAB - 2,
    "vision_start_token_id": VOCAB - 3,
    "vision_end_token_id": VOCAB - 4,
}
_QWEN3_TEXT = {
    **DENSE,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "image_size": 24,
    "patch_size": 4,
    "vision_use_head": False,
}
_GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 160,
    "use_clipped_linears": True,
    "standardize": True,
}
_GEMMA4_IDS = {
    "image_token_id": VOCAB - 1,
    "video_token_id": VOCAB - 2,
    "audio_token_id": VOCAB - 3,
    "boi_token_id": VOCAB - 4,
    "eoi_token_id": VOCAB - 5,
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "image_size": 64,
    "patch_size": 4,
}
_QWEN3_5_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "depth": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
# Features enter after three layers, so that a pipeline of four layers has to carry them over its first boundaries.
_QWEN3_VISION = {**_QWEN3_5_VISION, "depth": 4, "deepstack_visual_indexes": [0, 1, 2]}
_QWEN3_5_TEXT = {
    **SIZES["qwen3_5_text"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "image_size": 12,
    "patch_size": 4,
    "projection_dim": 16,
}
_QWEN2_5_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "depth": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
_QWEN_AUDIO = {
    "d_model": 16,
    "encoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "encoder_layers": 2,
    "num_mel_bins": 8,
    "max_source_positions": 12,
}
_GLM_TEXT = {
    **{key: value for key, value in DENSE.items() if key != "head_dim"},
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 1],
        "partial_rotary_factor": 0.75,
    },
}
_GLM_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "depth": 3,
    "out_hidden_size": 32,
    "patch_size": 4,
    "image_size": 24,
}
_GLM_IDS = {
    "image_token_id": VOCAB - 1,
    "video_token_id": VOCAB - 2,
    "image_start_token_id": VOCAB - 3,
    "image_end_token_id": VOCAB - 4,
    "video_start_token_id": VOCAB - 5,
    "video_end_token_id": VOCAB - 6,
}
MULTIMODAL_CONFIGS: dict[str, tuple[type[PretrainedConfig], dict, dict, dict]] = {
    "llava": (
        LlavaConfig,
        {**DENSE, "model_type": "llama"},
        {"vision": _CLIP},
        {"image_token_id": VOCAB - 1, "vision_feature_layer": -2},
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        {
            **{key: value for key, value in DENSE.items() if key != "head_dim"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        {"vision": _QWEN2_5_VISION},
        _QWEN_IDS,
    ),
    "gemma3": (
        Gemma3Config,
        SIZES["gemma3_text"],  # its window is shorter than an image
        {"vision": _SIGLIP},
        {"image_token_index": VOCAB - 1, "mm_tokens_per_image": 9},
    ),
    "gemma4": (
        Gemma4Config,
        SIZES["gemma4_text"],  # its window is shorter than the largest image
        {"vision": _GEMMA4_VISION},
        _GEMMA4_IDS,
    ),
    "gemma4_unified": (
        Gemma4UnifiedConfig,
        SIZES["gemma4_unified_text"],
        {
            "vision": {
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 32,
                "mm_posemb_size": 80,
                "output_proj_dims": 32,
            }
        },
        _GEMMA4_IDS,
    ),
    "mistral3": (
        Mistral3Config,
        {**DENSE, "model_type": "mistral"},
        {"vision": _PIXTRAL},
        {"image_token_id": VOCAB - 1, "spatial_merge_size": 2},
    ),
    "qwen3_vl": (Qwen3VLConfig, _QWEN3_TEXT, {"vision": _QWEN3_VISION}, _QWEN_IDS),
    "qwen3_vl_moe": (
        Qwen3VLMoeConfig,
        {**_QWEN3_TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        {"vision": _QWEN3_VISION},
        _QWEN_IDS,
    ),
    "qwen3_5": (Qwen3_5Config, _QWEN3_5_TEXT, {"vision": _QWEN3_5_VISION}, _QWEN_IDS),
    "qwen3_5_moe": (
        Qwen3_5MoeConfig,
        {**SIZES["qwen3_5_moe_text"], **_QWEN3_5_TEXT},
        {"vision": _QWEN3_5_VISION},
        _QWEN_IDS,
    ),
    "glm4v": (Glm4vConfig, _GLM_TEXT, {"vision": _GLM_VISION}, _GLM_IDS),
    "glm4v_moe": (
        Glm4vMoeConfig,
        {**_GLM_TEXT, **GROUPED, "n_group": 2, "head_dim": 8},
        {"vision": _GLM_VISION},
        _GLM_IDS,
    ),
    "internvl": (
        InternVLConfig,
        {**DENSE, "model_type": "qwen3"},
        {
            "vision": {
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "image_size": [16, 16],
                "patch_size": [4, 4],
            }
        },
        {"image_token_id": VOCAB - 1, "image_seq_length": 4},
    ),
    "qwen2_5_omni_thinker": (
        Qwen2_5OmniThinkerConfig,
        {
            **{key: value for key, value in DENSE.items() if key != "head_dim"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        {"vision": _QWEN2_5_VISION, "audio": {**_QWEN_AUDIO, "n_window": 4, "output_dim": 32}},
        {
            "image_token_index": VOCAB - 1,
            "video_token_index": VOCAB - 2,
            "vision_start_token_id": VOCAB - 3,
            "vision_end_token_id": VOCAB - 4,
            "audio_token_index": VOCAB - 5,
            "audio_start_token_id": VOCAB - 6,
            "audio_end_token_id": VOCAB - 7,
        },
    ),
    "qwen2_audio": (
        Qwen2AudioConfig,
        {**{key: value for key, value in DENSE.items() if key != "head_dim"}, "model_type": "qwen2"},
        {"audio": _QWEN_AUDIO},
        {"audio_token_index": VOCAB - 1},
    ),
}


def save_tiny_multimodal_model(
    folder: Path,
    family: str = "llava",
    *,
    tied: bool = False,
    num_layers: int = 4,
    dtype: torch.dtype = torch.float64,
    text: dict | None = None,
    encoders: dict | None = None,
    ids: dict | None = None,
    audio: dict | None = None,
) -> None:
    """A multimodal checkpoint with weights as lively, perhaps with an encoder of audio that is not trained."""
    config_class, text_sizes, of_encoders, special = MULTIMODAL_CONFIGS[family]
    changed = encoders or {}
    config = config_class(
        text_config={**of_layers(text_sizes, num_layers), **(text or {})},
        **{f"{name}_config": {**sizes, **changed.get(name, {})} for name, sizes in of_encoders.items()},
        tie_word_embeddings=tied,
        **{**special, **(ids or {})},
        **({} if audio is None else {"audio_config": audio}),
    )
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float64)
    save_lively(model, folder, dtype, plain_norms=family not in ("gemma3", "qwen3_5", "qwen3_5_moe"))
