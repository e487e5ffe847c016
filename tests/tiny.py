"""Tiny models and data, made at run time."""

from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from automodel_rl.batch import TokenSequence
from automodel_rl.tools.verify import comparison

VOCAB = 128
DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {**DENSE, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
WINDOW = 6
"""Shorter than most sequences, so that it matters."""

FAMILIES: dict[str, tuple[type[PretrainedConfig], dict]] = {
    "llama": (LlamaConfig, DENSE),
    "mistral": (MistralConfig, {**DENSE, "sliding_window": WINDOW}),
    "qwen2": (Qwen2Config, DENSE),
    "qwen3": (Qwen3Config, DENSE),
    "gemma2": (
        Gemma2Config,
        {
            **DENSE,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        {**DENSE, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    ),
    "mixtral": (MixtralConfig, {**MOE, "num_local_experts": 4}),
    "qwen3_moe": (Qwen3MoeConfig, {**MOE, "num_experts": 4, "moe_intermediate_size": 16}),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            **{key: value for key, value in MOE.items() if key not in ("head_dim", "router_aux_loss_coef")},
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        {**MOE, "num_local_experts": 4, "intermediate_size": 16, "sliding_window": WINDOW},
    ),
}


def save_tiny_model(
    folder: Path,
    family: str = "qwen3",
    *,
    tied: bool = False,
    num_layers: int = 4,
    dtype: torch.dtype = torch.float64,
    **sizes: object,
) -> None:
    """A checkpoint with livelier weights than the default initialisation, so that differences show."""
    config_class, defaults = FAMILIES[family]
    config = config_class(**{**defaults, "num_hidden_layers": num_layers, "tie_word_embeddings": tied, **sizes})
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
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.uniform_(buffer, -0.1, 0.1, generator=generator)
    model.to(dtype).save_pretrained(folder)


def make_sequences(num_sequences: int, seed: int, longest: int = 18) -> list[TokenSequence]:
    """Random sequences of different lengths with random loss masks, at least one trained token in each."""
    return comparison.make_sequences(num_sequences, seed, VOCAB, longest)


VISION_CONFIGS: dict[str, tuple[type[PretrainedConfig], dict, dict, dict]] = {
    "llava": (
        LlavaConfig,
        {**DENSE, "model_type": "llama"},
        {
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "image_size": 12,
            "patch_size": 4,
            "projection_dim": 16,
        },
        {"image_token_id": VOCAB - 1, "vision_feature_layer": -2},
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        {
            **{key: value for key, value in DENSE.items() if key != "head_dim"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "depth": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        {
            "image_token_id": VOCAB - 1,
            "video_token_id": VOCAB - 2,
            "vision_start_token_id": VOCAB - 3,
            "vision_end_token_id": VOCAB - 4,
        },
    ),
}


def save_tiny_vision_model(
    folder: Path,
    family: str = "llava",
    *,
    tied: bool = False,
    num_layers: int = 4,
    dtype: torch.dtype = torch.float64,
    text: dict | None = None,
    vision: dict | None = None,
    ids: dict | None = None,
) -> None:
    """A vision-language checkpoint with weights as lively."""
    config_class, text_sizes, vision_sizes, special = VISION_CONFIGS[family]
    config = config_class(
        text_config={**text_sizes, "num_hidden_layers": num_layers, **(text or {})},
        vision_config={**vision_sizes, **(vision or {})},
        tie_word_embeddings=tied,
        **{**special, **(ids or {})},
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    save_lively(model, folder, dtype, plain_norms=True)
