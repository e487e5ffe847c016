"""Sizes of a tiny model of each family, for `AutoConfig.for_model`."""

from typing import Any

VOCAB = 128
WINDOW = 6
"""Shorter than most sequences, so that it matters."""

WIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DENSE = {**WIDE, "head_dim": 8}
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"]}
"""Layer types are repeated for all layers."""

CHOSEN = {"num_experts_per_tok": 2}
MOE = {**DENSE, **CHOSEN, "router_aux_loss_coef": 0.0}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
"""Multi-head latent attention."""

INDEXED = {"index_topk": 5, "index_n_heads": 32, "index_head_dim": 8}
"""Sparse attention with fewer keys than most sequences have, and so many heads that no two scores are equal."""

GROUPED = {
    **CHOSEN,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
"""Experts in groups, with one that all tokens share and a dense first layer."""

MULTIPLIED = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}

SIZES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "mistral": {**DENSE, "sliding_window": WINDOW},
    "qwen2": DENSE,
    "qwen3": DENSE,
    "gemma2": {
        **DENSE,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**DENSE, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    "mixtral": {**MOE, "num_local_experts": 4},
    "qwen3_moe": {**MOE, "num_experts": 4, "moe_intermediate_size": 16},
    "deepseek_v3": {**WIDE, **LATENT, **GROUPED, "n_group": 2},
    "gpt_oss": {**MOE, "num_local_experts": 4, "intermediate_size": 16, "sliding_window": WINDOW},
    "cohere": {**WIDE, "logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {**DENSE, **WINDOWED, "logit_scale": 0.25},
    "jais2": DENSE,
    "mellum": {**MOE, **WINDOWED, "num_experts": 8, "moe_intermediate_size": 16},
    "granite": {**WIDE, **MULTIPLIED, "attention_multiplier": 0.2},
    "hyperclovax": {**DENSE, **MULTIPLIED, "attention_multiplier": 0.2},
    "olmo3": {**WIDE, **WINDOWED},
    "cohere2_moe": {**DENSE, **CHOSEN, **WINDOWED, "num_experts": 8, "logit_scale": 0.25},
    "ernie4_5_moe": {
        **DENSE,
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 99,
    },
    "exaone_moe": {
        **DENSE,
        **CHOSEN,
        **WINDOWED,
        "num_experts": 8,
        "num_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
    },
    "granitemoe": {**WIDE, **MULTIPLIED, **CHOSEN, "attention_multiplier": 0.2, "num_local_experts": 4},
    "granitemoeshared": {
        **WIDE,
        **MULTIPLIED,
        **CHOSEN,
        "attention_multiplier": 0.2,
        "num_local_experts": 4,
        "shared_intermediate_size": 16,
    },
    "hunyuan_v1_moe": {**DENSE, "num_experts": 4, "moe_topk": [2, 2]},
    "hy_v3": {**DENSE, **CHOSEN, "num_experts": 8, "num_shared_experts": 1, "moe_intermediate_size": 16},
    "mimo_v2_flash": {**DENSE, **CHOSEN, **WINDOWED, "n_routed_experts": 8, "moe_intermediate_size": 16},
    "qwen3_next": {
        **MOE,
        **LINEAR,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": {**DENSE, **LINEAR, "rope_parameters": MROPE},
    "qwen3_5_moe_text": {
        **MOE,
        **LINEAR,
        "rope_parameters": MROPE,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "apertus": DENSE,
    "arcee": DENSE,
    "ernie4_5": {**DENSE, "use_bias": True},
    "exaone4": {**WIDE, **WINDOWED, "sliding_window_pattern": 2},
    "gemma": DENSE,
    "glm": DENSE,
    "glm4": DENSE,
    "helium": DENSE,
    "hunyuan_v1_dense": DENSE,
    "ministral": {**DENSE, **WINDOWED},
    "ministral3": {
        **DENSE,
        "sliding_window": None,
        "max_position_embeddings": 16,
        "rope_parameters": {**YARN, "max_position_embeddings": 16, "llama_4_scaling_beta": 0.3},
    },
    "olmo2": WIDE,
    "phi3": {
        **WIDE,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 4096,
    },
    "seed_oss": {**DENSE, "attention_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {**DENSE, "no_rope_layers": [1, 0]},
    "starcoder2": {**WIDE, "sliding_window": None, "use_bias": True},
    "youtu": {**WIDE, **LATENT},
    "deepseek_v2": {**WIDE, **LATENT, **GROUPED, "n_group": 2, "topk_method": "group_limited_greedy"},
    "deepseek_v32": {**WIDE, **LATENT, **GROUPED, **INDEXED, "n_group": 2},
    "glm_moe_dsa": {**WIDE, **LATENT, **GROUPED, **INDEXED, "indexer_types": ["full", "shared"]},
    "kimi_linear": {
        **WIDE,
        **LATENT,
        **CHOSEN,
        "q_lora_rank": None,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_local_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
    },
    "falcon_h1": {
        **WIDE,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mlp_multipliers": [1.5, 0.7],
        "ssm_multipliers": [1.2, 0.8, 1.1, 0.9, 1.3],
        **dict.fromkeys(("embedding_multiplier", "attention_out_multiplier", "ssm_in_multiplier"), 1.4),
        **dict.fromkeys(("lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "ssm_out_multiplier"), 0.6),
    },
    "dots1": {**DENSE, **GROUPED, "sliding_window": WINDOW},
    "flex_olmo": {**WIDE, **CHOSEN, "num_experts": 4},
    "glm4_moe": {**DENSE, **GROUPED, "use_qk_norm": True},
    "glm4_moe_lite": {**WIDE, **LATENT, **GROUPED, "mlp_layer_types": ["dense", "sparse"]},
    "minimax_m2": {**DENSE, **CHOSEN, "num_local_experts": 4, "rotary_dim": 4},
    "olmoe": {**WIDE, **CHOSEN, "num_experts": 4},
    "qwen2_moe": {
        **WIDE,
        **CHOSEN,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "solar_open": {**DENSE, **GROUPED},
    "afmoe": {
        **DENSE,
        **CHOSEN,
        **WINDOWED,
        "num_experts": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
        "mup_enabled": True,
        "route_scale": 1.5,
    },
    "axk1": {**WIDE, **LATENT, **GROUPED},
    "cwm": {**DENSE, **WINDOWED, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "gemma4_text": {
        **DENSE,
        **CHOSEN,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "pad_token_id": 0,
    },
    "gemma4_unified_text": {
        **DENSE,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 16,
        "pad_token_id": 0,
    },
    "granite_swa": {**WIDE, **WINDOWED, **MULTIPLIED},
    "granitemoe_swa": {**WIDE, **WINDOWED, **MULTIPLIED, **CHOSEN, "num_local_experts": 4},
    "laguna": {
        **DENSE,
        **CHOSEN,
        **WINDOWED,
        "num_experts": 8,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_attention_heads_per_layer": [4, 8],
        "moe_router_logit_softcapping": 2.0,
        "moe_routed_scaling_factor": 1.5,
    },
    "lfm2": {**WIDE, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_bias": True},
    "lfm2_moe": {
        **WIDE,
        **CHOSEN,
        "layer_types": ["conv", "full_attention"],
        "num_experts": 8,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
    },
    "granitemoehybrid": {
        **WIDE,
        **MULTIPLIED,
        **CHOSEN,
        "attention_multiplier": 0.2,
        "num_local_experts": 4,
        "shared_intermediate_size": 64,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
    },
    "nemotron": DENSE,
    "nemotron_h": {
        **DENSE,
        **CHOSEN,
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 16,
    },
    "olmo_hybrid": {
        **WIDE,
        **LINEAR,
        "linear_value_head_dim": 8,  # unlike the width of keys
        "linear_allow_neg_eigval": True,
    },
    "olmo": WIDE,
}
"""By `model_type`."""

BY_LAYER = (
    "layer_types",
    "layers_block_type",
    "num_attention_heads_per_layer",
    "moe_topk",
    "mlp_layer_types",
    "no_rope_layers",
    "indexer_types",
)


def of_layers(sizes: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The sizes with what differs by layer repeated for all layers."""
    repeated = {key: (sizes[key] * num_layers)[:num_layers] for key in BY_LAYER if key in sizes}
    return {**sizes, **repeated, "num_hidden_layers": num_layers}
