"""Families of text models, one entry each."""

from dataclasses import replace
from typing import Any

from automodel_rl.families.family import Family, TPPlan
from automodel_rl.parallel.tensor_parallel import (
    BY_HEADS,
    COLUMNS,
    FUSED,
    FUSED_CHANNELS,
    FUSED_HEADS,
    FUSED_STATE_SPACE,
    FUSED_STATES,
    REPLICATED,
    ROWS,
    WIDE_NORM,
)

_NEMO = "nemo_automodel.components.models"
ATTENTION = (
    *((f"self_attn.{name}_proj", COLUMNS) for name in ("q", "k", "v")),
    ("self_attn.o_proj", ROWS),
)
LATENT_ATTENTION = (
    *((f"self_attn.{name}", COLUMNS) for name in ("q_proj", "q_b_proj", "kv_b_proj")),
    *((f"self_attn.{name}", REPLICATED) for name in ("q_a_proj", "q_a_layernorm")),
    *((f"self_attn.{name}", REPLICATED) for name in ("kv_a_proj_with_mqa", "kv_a_layernorm")),
    ("self_attn.o_proj", ROWS),
)
_SINKS = (("self_attn.sinks", BY_HEADS),)
NORMS_OF_HEADS = (("self_attn.q_norm", REPLICATED), ("self_attn.k_norm", REPLICATED))
_WIDE_NORMS = (*ATTENTION, ("self_attn.q_norm", WIDE_NORM), ("self_attn.k_norm", WIDE_NORM))
MLP = (("mlp.gate_proj", COLUMNS), ("mlp.up_proj", COLUMNS), ("mlp.down_proj", ROWS))
FUSED_MLP = (("mlp.gate_up_proj", FUSED), ("mlp.down_proj", ROWS))
_HUNYUAN = (
    *ATTENTION,
    ("self_attn.query_layernorm", REPLICATED),
    ("self_attn.key_layernorm", REPLICATED),
    *MLP,
)
SHARED_EXPERTS: TPPlan = tuple(
    (f"mlp.{shared}.{name}_proj", style)
    for shared in ("shared_expert", "shared_experts", "shared_mlp")
    for name, style in (("gate", COLUMNS), ("up", COLUMNS), ("down", ROWS))
)
"""Shared experts are split; routed experts and routers are not."""

SOFTMAX_MIXTURE = Family(is_moe=True, tp_plan=SHARED_EXPERTS)
BIASED_MIXTURE = replace(SOFTMAX_MIXTURE, router_bias="gate.e_score_correction_bias", computes_in_fp32=True)
_SPARSE = replace(
    BIASED_MIXTURE,
    index_rotary="halves",
    tp_plan=(
        *LATENT_ATTENTION,
        *((f"self_attn.indexer.{name}", REPLICATED) for name in ("wq_b", "wk", "k_norm", "weights_proj")),
        *SHARED_EXPERTS,
    ),
)
_GRANITE = Family(embedding_factor="embedding_multiplier", logit_divisor="logits_scaling")
_GRANITE_MIXTURE = replace(_GRANITE, is_moe=True, block="block_sparse_moe", router="router", tp_plan=ATTENTION)
_GEMMA4 = Family(
    is_moe=True,  # the 26B-A4B
    block="",
    router="router",
    router_gives_logits=False,
    shares_kv=True,
    scales_embedding=True,
    has_plain_norms=False,
    rotary_by_layer_type=True,
    computes_in_fp32=True,
)
_DELTA_NET: dict[str, Any] = {
    "has_plain_norms": False,
    "computes_in_fp32": True,
    "token_mixer": "gated_delta_net",
    "fp32_modules": ("linear_attn.decay",),
    "mtp_files": "mtp",
}
_DELTA_NET_PLAN = (
    *((f"linear_attn.in_proj_{name}", COLUMNS) for name in ("qkvz", "ba", "z", "b", "a")),
    ("linear_attn.in_proj_qkv", FUSED_STATES),
    *((f"linear_attn.decay.{name}", BY_HEADS) for name in ("A_log", "dt_bias")),
    ("linear_attn.conv1d", REPLICATED),
    ("linear_attn.norm", REPLICATED),
    ("linear_attn.out_proj", ROWS),
)

_OLMO_DELTA_NET_PLAN = (
    *((f"linear_attn.{name}_proj", COLUMNS) for name in ("q", "k", "v", "g", "a", "b")),
    *((f"linear_attn.decay.{name}", BY_HEADS) for name in ("A_log", "dt_bias")),
    ("linear_attn.conv1d", REPLICATED),
    ("linear_attn.o_norm", REPLICATED),
    ("linear_attn.o_proj", ROWS),
)
_LFM2_MOE_NAMES = (("embedding_norm", "norm"), ("pos_emb", "rotary_emb"))
_LFM2 = Family(
    token_mixer="short_convolution",
    renamed_modules=(("embedding_norm", "norm"),),
    tp_plan=(
        *((f"self_attn.{name}_proj", COLUMNS) for name in ("q", "k", "v")),
        *((f"self_attn.{name}_layernorm", REPLICATED) for name in ("q", "k")),
        ("self_attn.out_proj", ROWS),
        ("conv.in_proj", FUSED_CHANNELS),
        ("conv.conv", REPLICATED),
        ("conv.out_proj", ROWS),
        *((f"feed_forward.{name}", style) for name, style in (("w1", COLUMNS), ("w3", COLUMNS), ("w2", ROWS))),
    ),
)


def _state_space(module: str, norm: str) -> TPPlan:
    """Returns the tensor-parallel styles of a Mamba-2 module. `norm` is the style of its norm."""
    return (
        (f"{module}.in_proj", FUSED_STATE_SPACE),
        *((f"{module}.decay.{name}", BY_HEADS) for name in ("A_log", "dt_bias", "D")),
        (f"{module}.conv1d", REPLICATED),
        (f"{module}.norm", norm),
        (f"{module}.out_proj", ROWS),
    )


_NEMOTRON_H = replace(
    BIASED_MIXTURE,
    block="mixer",
    token_mixer="nemotron_mamba2",
    renamed_modules=(("embeddings", "embed_tokens"), ("norm_f", "norm")),
    fp32_modules=("mixer.decay",),
    tp_plan=(
        *((f"mixer.{name}_proj", COLUMNS) for name in ("q", "k", "v", "up")),
        *((f"mixer.{name}_proj", ROWS) for name in ("o", "down")),
        *((f"mixer.shared_experts.{name}_proj", style) for name, style in (("up", COLUMNS), ("down", ROWS))),
        *_state_space("mixer", BY_HEADS),
    ),
)
_GRANITE_HYBRID = replace(
    _GRANITE_MIXTURE,
    computes_in_fp32=True,
    token_mixer="mamba2",
    fp32_modules=("mamba.decay",),
    tp_plan=(
        *ATTENTION,
        *_state_space("mamba", WIDE_NORM),
        ("shared_mlp.input_linear", FUSED),
        ("shared_mlp.output_linear", ROWS),
    ),
)

TEXT_FAMILIES = {
    "llama": Family(nemo_class=(f"{_NEMO}.llama.model", "LlamaForCausalLM")),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(nemo_class=(f"{_NEMO}.qwen3.model", "Qwen3ForCausalLM")),
    "gemma2": Family(scales_embedding=True, has_plain_norms=False, computes_in_fp32=True),
    "gemma3_text": Family(
        scales_embedding=True, has_plain_norms=False, rotary_by_layer_type=True, computes_in_fp32=True
    ),
    "mixtral": SOFTMAX_MIXTURE,
    "qwen3_moe": replace(SOFTMAX_MIXTURE, nemo_class=(f"{_NEMO}.qwen3_moe.model", "Qwen3MoeForCausalLM")),
    "deepseek_v3": replace(
        BIASED_MIXTURE,
        mtp_files="layer",
        tp_plan=LATENT_ATTENTION,
        nemo_class=(f"{_NEMO}.deepseek_v3.model", "DeepseekV3ForCausalLM"),
    ),
    "gpt_oss": Family(
        is_moe=True,
        router="router",
        transposes_experts=True,
        has_sinks=True,
        tp_plan=(*ATTENTION, *_SINKS),
        nemo_class=(f"{_NEMO}.gpt_oss.model", "GptOssForCausalLM"),
    ),
    "afmoe": replace(
        BIASED_MIXTURE,
        router="router",
        router_bias="expert_bias",
        root_factor="mup_enabled",
        tp_plan=(*ATTENTION, ("self_attn.gate_proj", COLUMNS), *NORMS_OF_HEADS, *SHARED_EXPERTS),
    ),
    "apertus": Family(tp_plan=(("mlp.act_fn", REPLICATED),)),
    "arcee": Family(),
    "axk1": replace(BIASED_MIXTURE, tp_plan=(*LATENT_ATTENTION, *SHARED_EXPERTS)),
    "cohere": Family(
        logit_factor="logit_scale",
        computes_in_fp32=True,
        tp_plan=(("self_attn.q_norm", BY_HEADS), ("self_attn.k_norm", BY_HEADS)),
    ),
    "cohere2": Family(logit_factor="logit_scale", computes_in_fp32=True),
    "cwm": Family(),
    "ernie4_5": Family(),
    "exaone4": Family(),
    "falcon_h1": Family(
        embedding_factor="embedding_multiplier",
        logit_factor="lm_head_multiplier",
        computes_in_fp32=True,
        token_mixer="scaled_mamba2",
        renamed_modules=(("final_layernorm", "norm"),),
        fp32_modules=("mamba.decay",),
        tp_plan=(
            *ATTENTION,
            *_state_space("mamba", REPLICATED),
            *((name.replace("mlp.", "feed_forward."), style) for name, style in MLP),
        ),
    ),
    "gemma": Family(scales_embedding=True, has_plain_norms=False, computes_in_fp32=True),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(_GEMMA4, is_moe=False),
    "glm": Family(tp_plan=FUSED_MLP),
    "glm4": Family(tp_plan=FUSED_MLP),
    "granite": _GRANITE,
    "granite_swa": replace(_GRANITE, has_sinks=True, tp_plan=_SINKS),
    "helium": Family(computes_in_fp32=True, has_square_output=True),
    "hunyuan_v1_dense": Family(tp_plan=_HUNYUAN),
    "hyperclovax": Family(embedding_factor="embedding_multiplier", logit_factor="logits_scaling"),
    "jais2": Family(),
    "lfm2": _LFM2,
    "ministral": Family(),
    "ministral3": Family(),
    "olmo": Family(),
    "olmo2": Family(tp_plan=_WIDE_NORMS),
    "olmo_hybrid": Family(
        **{**_DELTA_NET, "token_mixer": "olmo_delta_net", "mtp_files": ""},
        tp_plan=(*_WIDE_NORMS, *_OLMO_DELTA_NET_PLAN),
    ),
    "olmo3": Family(rotary_by_layer_type=True, tp_plan=_WIDE_NORMS),
    "phi3": Family(tp_plan=(("self_attn.qkv_proj", FUSED_HEADS), ("self_attn.o_proj", ROWS), *FUSED_MLP)),
    "seed_oss": Family(),
    "smollm3": Family(),
    "starcoder2": Family(),
    "youtu": Family(tp_plan=LATENT_ATTENTION),
    "cohere2_moe": replace(SOFTMAX_MIXTURE, logit_factor="logit_scale", computes_in_fp32=True),
    "deepseek_v2": replace(SOFTMAX_MIXTURE, computes_in_fp32=True, tp_plan=LATENT_ATTENTION),
    "deepseek_v32": _SPARSE,
    "dots1": BIASED_MIXTURE,
    "exaone_moe": BIASED_MIXTURE,
    "flex_olmo": replace(SOFTMAX_MIXTURE, tp_plan=_WIDE_NORMS),
    "ernie4_5_moe": replace(
        BIASED_MIXTURE,
        router_bias="gate.moe_statics.e_score_correction_bias",
        fp32_modules=("mlp.gate",),
    ),
    "glm4_moe": replace(BIASED_MIXTURE, mtp_files="layer", tp_plan=NORMS_OF_HEADS),
    "glm4_moe_lite": replace(BIASED_MIXTURE, mtp_files="layer", tp_plan=(*LATENT_ATTENTION, *SHARED_EXPERTS)),
    "glm_moe_dsa": replace(_SPARSE, index_rotary="pairs", carried_argument="prev_topk_indices"),
    "granitemoe": _GRANITE_MIXTURE,
    "granitemoeshared": _GRANITE_MIXTURE,
    "granitemoehybrid": _GRANITE_HYBRID,
    "granitemoe_swa": replace(_GRANITE_MIXTURE, has_sinks=True, tp_plan=(*ATTENTION, *_SINKS)),
    "hunyuan_v1_moe": replace(
        SOFTMAX_MIXTURE, computes_in_fp32=True, fp32_modules=("mlp.gate",), tp_plan=(*_HUNYUAN, *SHARED_EXPERTS)
    ),
    "hy_v3": replace(BIASED_MIXTURE, router_bias="e_score_correction_bias"),
    "kimi_linear": replace(
        BIASED_MIXTURE,
        token_mixer="kimi_delta",
        fp32_modules=("self_attn.decay",),
        tp_plan=(
            *LATENT_ATTENTION,
            *((f"self_attn.{name}_proj", COLUMNS) for name in ("k", "v", "b", "g_b", "forget_gate.f_b")),
            *((f"self_attn.{name}_proj", REPLICATED) for name in ("g_a", "forget_gate.f_a")),
            *((f"self_attn.{name}", REPLICATED) for name in ("conv1d", "o_norm", "decay")),
            *MLP,
            *SHARED_EXPERTS,
        ),
    ),
    "laguna": replace(
        BIASED_MIXTURE,
        rotary_by_layer_type=True,
        tp_plan=(*ATTENTION, ("self_attn.g_proj", COLUMNS), *NORMS_OF_HEADS, *SHARED_EXPERTS),
    ),
    "lfm2_moe": replace(
        _LFM2, is_moe=True, block="feed_forward", router_bias="expert_bias", renamed_modules=_LFM2_MOE_NAMES
    ),
    "nemotron": Family(
        passes_all_arguments=False, tp_plan=(*ATTENTION, ("mlp.up_proj", COLUMNS), ("mlp.down_proj", ROWS))
    ),
    "nemotron_h": _NEMOTRON_H,
    "mellum": replace(SOFTMAX_MIXTURE, rotary_by_layer_type=True),
    "mimo_v2_flash": replace(
        BIASED_MIXTURE,
        has_sinks=True,
        rotary_by_layer_type=True,
        mtp_files="mimo",
        mtp_kinds=("sliding_attention", "dense"),
        tp_plan=_SINKS,
    ),
    "minimax_m2": replace(BIASED_MIXTURE, router_bias="e_score_correction_bias", tp_plan=_WIDE_NORMS),
    "olmoe": replace(SOFTMAX_MIXTURE, tp_plan=_WIDE_NORMS),
    "qwen2_moe": SOFTMAX_MIXTURE,
    "solar_open": BIASED_MIXTURE,
    "qwen3_next": replace(SOFTMAX_MIXTURE, **_DELTA_NET, tp_plan=(*_DELTA_NET_PLAN, *SHARED_EXPERTS)),
    "qwen3_5_text": Family(**_DELTA_NET, tp_plan=_DELTA_NET_PLAN, rotary_axes=3),
    "qwen3_5_moe_text": replace(
        SOFTMAX_MIXTURE, **_DELTA_NET, tp_plan=(*_DELTA_NET_PLAN, *SHARED_EXPERTS), rotary_axes=3
    ),
}
"""Families by the `model_type` of a causal language model's config."""
