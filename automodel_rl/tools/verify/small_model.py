"""A small model of the same architecture: keeps everything that a layout depends on and shrinks the rest."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig

from automodel_rl.config import ParallelConfig
from automodel_rl.families.known import encoder_families, language_config
from automodel_rl.families.multimodal import encoder_config
from automodel_rl.support.description import experts_per_token

HEAD_DIM = 8
WINDOW = 6
"""Sliding-window size, shorter than most sequences, so that it has an effect."""

ORIGINAL_CONTEXT = 8
"""Position from which rotary scaling applies, below the length of most sequences, so that it has an effect."""

PATCH = 4

MROPE_SECTION = [1, 1, 2]
"""Shares of time, height and width in half a head."""

MAX_EXPERTS = 16
"""Number of experts kept: more would only take time. Raised if ep or the routing needs more."""


SIZES_OF_HEADS = ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "query_pre_attn_scalar")

SPECIAL_IDS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "image_start_token_id",
    "image_end_token_id",
    "video_start_token_id",
    "video_end_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
    "audio_start_token_id",
    "audio_end_token_id",
)
"""Config keys with ids of special tokens."""


DRAWN_BUFFERS = {
    "e_score_correction_bias": (-0.1, 0.1),
    "expert_bias": (-0.1, 0.1),
    "layer_scalar": (-0.1, 0.1),
    "std_bias": (-0.1, 0.1),
    "std_scale": (0.5, 1.5),
    "put_min": (-1.0, -0.5),
    "put_max": (0.5, 1.0),
}
"""Suffixes of persistent buffers, with bounds. They are drawn at random, as errors in reading zeros would not show."""


def shrink(config: PretrainedConfig, parallel: ParallelConfig, whole_heads: bool = False) -> PretrainedConfig:
    """Returns a config with the same layers, layer types, head grouping, routing, weight tying and scalings.

    Widths, vocabulary, window and expert count shrink to the least that the layout can split.

    Args:
        config: config of a language model.
        whole_heads: keep the size of heads, which decides the available attention kernels.
    """
    values = config.to_dict()
    head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    group = max(1, config.num_attention_heads // (values.get("num_key_value_heads") or config.num_attention_heads))
    kv_heads = math.lcm(2, parallel.tp * (1 if parallel.cp_exchange == "all_gather" else parallel.cp))
    heads = kv_heads * min(group, 2)
    small = {
        "hidden_size": heads * (head_dim if whole_heads else HEAD_DIM),
        # In DeepSeek's config this is the rotary part.
        "head_dim": HEAD_DIM // 2 if values.get("qk_rope_head_dim") else HEAD_DIM,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if group > 1 else heads,
        "intermediate_size": 16 * math.lcm(2, parallel.tp),
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "vocab_size": 64 * parallel.tp,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 2 * HEAD_DIM,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "linear_num_key_heads": (linear := math.lcm(2, parallel.tp * parallel.cp)),
        "linear_num_value_heads": 2 * linear,
        "linear_key_head_dim": HEAD_DIM,
        "linear_value_head_dim": HEAD_DIM,
        "mamba_num_heads": 2 * (mixers := math.lcm(2, parallel.tp * parallel.cp)),
        "mamba_head_dim": HEAD_DIM,
        "ssm_state_size": HEAD_DIM,
        "n_groups": mixers,
        "moe_shared_expert_intermediate_size": 16,
        "moe_latent_size": 16,
        "mamba_d_head": HEAD_DIM,
        "mamba_d_state": HEAD_DIM,
        "qk_rope_head_dim": HEAD_DIM // 2,
        "qk_nope_head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
    }
    kept_sizes = SIZES_OF_HEADS if whole_heads else ()
    changed: dict[str, Any] = {
        key: size for key, size in small.items() if values.get(key) is not None and key not in kept_sizes
    }
    changed |= _rotary(values)
    changed |= _of_some_layers(values, small)
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if values.get(key):
            changed[key] = _num_experts(config, key, parallel)
    # Small ids of special tokens, for config classes that require them.
    named = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {key: place if isinstance(values.get(key), int) else None for place, key in enumerate(named)}
    kept = {key: value for key, value in values.items() if key not in ("model_type", "architectures", "dtype")}
    return AutoConfig.for_model(config.model_type, **{**kept, **changed, **ids})


def _of_some_layers(values: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Settings of individual layers and of rare modules in the small config. `small` holds the sizes of all layers."""
    changed: dict[str, Any] = {}
    if by_layer := values.get("num_attention_heads_per_layer"):
        fewest, heads = min(by_layer), small["num_attention_heads"]
        changed["num_attention_heads_per_layer"] = [heads * min(2, count // fewest) for count in by_layer]
    if values.get("mamba_n_heads"):  # the heads' widths must add up to the inner width
        changed["mamba_n_heads"] = int(values["mamba_expand"] * small["hidden_size"]) // HEAD_DIM
        changed["mamba_n_groups"] = min(values["mamba_n_groups"], 2)
        changed |= {"mamba_d_ssm": changed["mamba_n_heads"] * HEAD_DIM} if values.get("mamba_d_ssm") else {}
    if values.get("linear_num_heads"):
        changed |= {"linear_num_heads": small["linear_num_key_heads"], "linear_head_dim": HEAD_DIM}
        changed["linear_attn_config"] = {}  # published configs have these sizes here
    if values.get("index_topk"):  # with fewer heads many scores would tie at 0
        changed |= {"index_topk": WINDOW, "index_head_dim": HEAD_DIM, "index_n_heads": 32}
    if values.get("hidden_size_per_layer_input"):
        changed |= {"hidden_size_per_layer_input": HEAD_DIM, "vocab_size_per_layer_input": small["vocab_size"]}
    if of_layers := values.get("per_layer_config"):
        wider = {"head_dim": 2 * HEAD_DIM, "num_key_value_heads": small["num_key_value_heads"]}
        changed["per_layer_config"] = {
            number: {key: wider.get(key, value) for key, value in of_layer.items()}
            for number, of_layer in of_layers.items()
        }
    return changed


def _rotary(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings of the small config. Scaling sets in within short sequences."""
    rope = values.get("rope_parameters") or {}
    kinds = {name: kind for name, kind in rope.items() if isinstance(kind, dict)} or {"": rope}
    longest, changed = values.get("max_position_embeddings"), {}
    for kind in kinds.values():
        if kind.get("mrope_section"):
            kind["mrope_section"] = MROPE_SECTION
            if kind.get("partial_rotary_factor", 1.0) < 1.0 and not kind.get("mrope_interleaved"):
                kind |= {"partial_rotary_factor": 0.75, "mrope_section": [1, 1, 1]}  # smallest with all three axes
        if kind.get("rope_type", "default") != "default" and longest:
            original = kind.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
            changed["max_position_embeddings"] = ORIGINAL_CONTEXT * max(1, round(longest / (original or longest)))
            if original:
                kind["original_max_position_embeddings"] = ORIGINAL_CONTEXT
    if values.get("original_max_position_embeddings"):
        changed["original_max_position_embeddings"] = ORIGINAL_CONTEXT
    return {**changed, "rope_parameters": kinds.get("", kinds)} if rope else changed


def shrink_multimodal(config: PretrainedConfig, parallel: ParallelConfig, tp: int) -> PretrainedConfig:
    """Shrinks every component of a multimodal config except its number of layers.

    Args:
        config: config of the whole model.
        parallel: layout of the language model.
        tp: tensor-parallel size of the image encoder.
    """
    language = shrink(language_config(config), parallel)
    heads = math.lcm(2, tp)
    small = {
        "hidden_size": heads * HEAD_DIM,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_heads": heads,
        "intermediate_size": 16 * heads,
        "projection_dim": heads * HEAD_DIM,
        "head_dim": HEAD_DIM,
        "out_hidden_size": language.hidden_size,
        "patch_size": PATCH,
        "image_size": 3 * PATCH,
        "window_size": 4 * PATCH,
        "d_model": heads * HEAD_DIM,
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": 16 * heads,
        "num_mel_bins": 2 * PATCH,
        "max_source_positions": 12,
        "n_window": 4,
        "output_dim": language.hidden_size,
        "position_embedding_size": 16,
        "mm_embed_dim": language.hidden_size,
        "mm_posemb_size": 16,
        "output_proj_dims": language.hidden_size,
    }
    values = config.to_dict()
    last = language.vocab_size - 1
    ids = {name: last - number for number, name in enumerate(name for name in SPECIAL_IDS if name in values)}
    kept = {key: value for key, value in values.items() if key not in ("architectures", "dtype")}
    if "mm_tokens_per_image" in values:
        kept["mm_tokens_per_image"] = (small["image_size"] // PATCH) ** 2
    changed = {"text_config": language.to_dict()}
    for name in encoder_families(config):
        encoder = encoder_config(config, name).to_dict()
        smaller = {key: size for key, size in small.items() if encoder.get(key) is not None}
        if "downsample_ratio" in values and name == "vision":  # an even number of patches per side
            smaller["image_size"] = 4 * PATCH
            kept["image_seq_length"] = int(4 * values["downsample_ratio"]) ** 2
        changed[f"{name}_config"] = {**encoder, **smaller}
    return type(config).from_dict({**kept, **ids, **changed})


def _num_experts(config: PretrainedConfig, key: str, parallel: ParallelConfig) -> int:
    """An expert count sufficient for the routing and divisible by ep and the number of expert groups."""
    values = config.to_dict()
    unit = math.lcm(parallel.ep, (values.get("n_group") or 1) * 2)
    needed = max(MAX_EXPERTS, 2 * experts_per_token(config) * (values.get("n_group") or 1))
    return min(values[key], -(-needed // unit) * unit)


def save_random_model(config: PretrainedConfig, folder: Path, dtype: torch.dtype) -> None:
    """Writes a checkpoint with larger random weights than the default initialization, so that differences show."""
    generator = torch.Generator().manual_seed(0)
    kind = AutoModelForMultimodalLM if encoder_families(config) else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1, generator=generator)
        else:
            # Norms compute weight * x or (1 + weight) * x; the mean of the initial weight shows which.
            middle = 1.0 if "norm" not in name or parameter.mean() > 0.5 else 0.0
            nn.init.uniform_(parameter, middle - 0.2, middle + 0.2, generator=generator)
    draw_buffers(model, generator)
    model.to(dtype).save_pretrained(folder)


def draw_buffers(model: nn.Module, generator: torch.Generator) -> None:
    for name, buffer in model.named_buffers():
        for bounds in (bounds for end, bounds in DRAWN_BUFFERS.items() if name.endswith(end)):
            nn.init.uniform_(buffer, *bounds, generator=generator)
