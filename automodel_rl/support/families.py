"""Facts that differ between model families and are not in their configs. This is the only place that names families."""

from dataclasses import dataclass, replace
from typing import Any

from automodel_rl.parallel.tensor_parallel import (
    BY_HEADS,
    COLUMNS,
    FUSED,
    FUSED_HEADS,
    FUSED_STATES,
    REPLICATED,
    ROWS,
    WIDE_NORM,
)
from automodel_rl.support.encoders import MULTIMODAL_FAMILIES, Multimodal, TPPlan


@dataclass(frozen=True)
class ExpertNames:
    """How files name the weights that transformers fuses in `...mlp.experts.gate_up_proj` and `.down_proj`.

    Attributes:
        block: the name in files of the module that is `mlp` in the model.
        gate, up, down: the names of one expert's weights.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class Family:
    """One model family, by the `model_type` of its config.

    Attributes:
        experts: names of separate experts in files; None if files hold the same tensors as the model.
        is_moe: whether it has a mixture of experts.
        block: name of a layer's mixture.
        router: name of the router beside the experts.
        router_bias: name, below the layer's mixture, of the bias with which a router chooses experts. It is trained by
            load (DeepSeek-V3, arXiv:2412.19437). Empty if there is none.
        transposes_experts: whether the experts' stacked weights are [experts, inputs, outputs].
        files_turn_experts: whether some files have these stacks [experts, outputs, inputs], as transformers 5.18 writes
            them, though it reads both.
        has_sinks: whether attention has a learned sink for each head.
        rotary_by_layer_type: whether rotary embeddings differ between full and sliding-window layers.
        rotary_axes: number of axes of rotary positions, 3 for a language model that can read images (M-RoPE).
        fp32_modules: names, below a layer, of modules whose weights stay in fp32.
        scales_embedding: whether the embedding module multiplies what it looks up.
        embedding_factor: key of the config with what the model multiplies embeddings with; empty if there is none.
        logit_factor, logit_divisor: the same for what multiplies and what divides logits.
        has_plain_norms: whether RMSNorm is weight * x / rms(x), and not Gemma's (1 + weight).
        computes_in_fp32: whether parts of it compute in fp32 whatever the dtype, so that float64 is not exact.
        tp_plan: how tensor parallelism splits modules or parameters of a layer, by their names below it, where
            transformers' own plan for the model says nothing or says what this package does not do.
        nemo_class: module and name of nemo_automodel's own class, if this package can run it.
        multimodal: its encoders, if it has any. All other facts are then those of its language model's family.
        is_part: whether it is the language model of such a family, and no model of its own.
        names_in_files_of: the family whose checkpoints may have other tensor names. The entry then describes these
            names and nothing else. None for a family.
        tell_tale: pattern of a name that only such files have.
        renamed: patterns of names in the model and their text in files, for tensors with other names there.
    """

    experts: ExpertNames | None = None
    is_moe: bool = False
    block: str = "mlp"
    router: str = "gate"
    router_bias: str = ""
    transposes_experts: bool = False
    files_turn_experts: bool = False
    has_sinks: bool = False
    rotary_by_layer_type: bool = False
    rotary_axes: int = 1
    fp32_modules: tuple[str, ...] = ()
    scales_embedding: bool = False
    embedding_factor: str = ""
    logit_factor: str = ""
    logit_divisor: str = ""
    has_plain_norms: bool = True
    computes_in_fp32: bool = False
    tp_plan: TPPlan = ()
    nemo_class: tuple[str, str] | None = None
    multimodal: Multimodal | None = None
    is_part: bool = False
    names_in_files_of: str | None = None
    tell_tale: str = ""
    renamed: tuple[tuple[str, str], ...] = ()

    def is_exact(self, tp: int) -> bool:
        """Whether a float64 model of the family computes in float64, or rounds to fp32 as transformers does.

        Args:
            tp: number of ranks that split each layer. Norms over split columns round another sum, and norms before
                split ones of latent attention get each rank's part of their gradient in fp32.
        """
        rounded = WIDE_NORM in dict(self.tp_plan).values() or ("self_attn.kv_a_layernorm", REPLICATED) in self.tp_plan
        return not self.computes_in_fp32 and (tp == 1 or not rounded)

    def whole_tp_plan(self, base: dict[str, str] | None) -> dict[str, str]:
        """How all modules split, by patterns of names below `model`.

        Args:
            base: transformers' `base_model_tp_plan`, if the config has one.
        """
        return {**(base or {}), **{f"layers.*.{name}": style for name, style in self.tp_plan}}


_NEMO = "nemo_automodel.components.models"
_ATTENTION = (
    *((f"self_attn.{name}_proj", COLUMNS) for name in ("q", "k", "v")),
    ("self_attn.o_proj", ROWS),
)
_LATENT_ATTENTION = (
    *((f"self_attn.{name}", COLUMNS) for name in ("q_proj", "q_b_proj", "kv_b_proj")),
    *((f"self_attn.{name}", REPLICATED) for name in ("q_a_proj", "q_a_layernorm")),
    *((f"self_attn.{name}", REPLICATED) for name in ("kv_a_proj_with_mqa", "kv_a_layernorm")),
    ("self_attn.o_proj", ROWS),
)
_SINKS = (("self_attn.sinks", BY_HEADS),)
_NORMS_OF_HEADS = (("self_attn.q_norm", REPLICATED), ("self_attn.k_norm", REPLICATED))
_WIDE_NORMS = (*_ATTENTION, ("self_attn.q_norm", WIDE_NORM), ("self_attn.k_norm", WIDE_NORM))
_MLP = (("mlp.gate_proj", COLUMNS), ("mlp.up_proj", COLUMNS), ("mlp.down_proj", ROWS))
_FUSED_MLP = (("mlp.gate_up_proj", FUSED), ("mlp.down_proj", ROWS))
_HUNYUAN = (
    *_ATTENTION,
    ("self_attn.query_layernorm", REPLICATED),
    ("self_attn.key_layernorm", REPLICATED),
    *_MLP,
)
_SHARED_EXPERTS: TPPlan = tuple(
    (f"mlp.{shared}.{name}_proj", style)
    for shared in ("shared_expert", "shared_experts", "shared_mlp")
    for name, style in (("gate", COLUMNS), ("up", COLUMNS), ("down", ROWS))
)
"""Experts that all tokens share are split; those that tokens choose are not, and neither are routers."""

_SOFTMAX_MIXTURE = Family(ExpertNames(), is_moe=True, tp_plan=_SHARED_EXPERTS)
_BIASED_MIXTURE = replace(_SOFTMAX_MIXTURE, router_bias="gate.e_score_correction_bias", computes_in_fp32=True)
_GRANITE_MIXTURE = Family(
    is_moe=True,
    block="block_sparse_moe",
    router="router",
    embedding_factor="embedding_multiplier",
    logit_divisor="logits_scaling",
    tp_plan=_ATTENTION,
    renamed=(
        (r"\.experts\.gate_up_proj$", ".input_linear.weight"),
        (r"\.experts\.down_proj$", ".output_linear.weight"),
        (r"\.router\.weight$", ".router.layer.weight"),
    ),
)
_DELTA_NET: dict[str, Any] = {
    "has_plain_norms": False,
    "computes_in_fp32": True,
    "fp32_modules": ("linear_attn.decay",),
    "renamed": ((r"\.linear_attn\.decay\.", ".linear_attn."),),
}
_DELTA_NET_PLAN = (
    *((f"linear_attn.in_proj_{name}", COLUMNS) for name in ("qkvz", "ba", "z", "b", "a")),
    ("linear_attn.in_proj_qkv", FUSED_STATES),
    *((f"linear_attn.decay.{name}", BY_HEADS) for name in ("A_log", "dt_bias")),
    ("linear_attn.conv1d", REPLICATED),
    ("linear_attn.norm", REPLICATED),
    ("linear_attn.out_proj", ROWS),
)
_MIXTRAL_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")

FAMILIES = {
    "llama": Family(nemo_class=(f"{_NEMO}.llama.model", "LlamaForCausalLM")),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(nemo_class=(f"{_NEMO}.qwen3.model", "Qwen3ForCausalLM")),
    "gemma2": Family(scales_embedding=True, has_plain_norms=False, computes_in_fp32=True),
    "gemma3_text": Family(
        scales_embedding=True, has_plain_norms=False, rotary_by_layer_type=True, computes_in_fp32=True
    ),
    "mixtral": replace(_SOFTMAX_MIXTURE, experts=_MIXTRAL_NAMES),
    "qwen3_moe": replace(_SOFTMAX_MIXTURE, nemo_class=(f"{_NEMO}.qwen3_moe.model", "Qwen3MoeForCausalLM")),
    "deepseek_v3": replace(
        _BIASED_MIXTURE, tp_plan=_LATENT_ATTENTION, nemo_class=(f"{_NEMO}.deepseek_v3.model", "DeepseekV3ForCausalLM")
    ),
    "gpt_oss": Family(
        is_moe=True,
        router="router",
        transposes_experts=True,
        has_sinks=True,
        tp_plan=(*_ATTENTION, *_SINKS),
        nemo_class=(f"{_NEMO}.gpt_oss.model", "GptOssForCausalLM"),
    ),
    "apertus": Family(tp_plan=(("mlp.act_fn", REPLICATED),)),
    "arcee": Family(),
    "cohere": Family(
        logit_factor="logit_scale",
        computes_in_fp32=True,
        tp_plan=(("self_attn.q_norm", BY_HEADS), ("self_attn.k_norm", BY_HEADS)),
    ),
    "cohere2": Family(logit_factor="logit_scale", computes_in_fp32=True),
    "ernie4_5": Family(),
    "exaone4": Family(),
    "gemma": Family(scales_embedding=True, has_plain_norms=False, computes_in_fp32=True),
    "glm": Family(tp_plan=_FUSED_MLP),
    "glm4": Family(tp_plan=_FUSED_MLP),
    "granite": Family(embedding_factor="embedding_multiplier", logit_divisor="logits_scaling"),
    "helium": Family(computes_in_fp32=True),
    "hunyuan_v1_dense": Family(tp_plan=_HUNYUAN),
    "hyperclovax": Family(embedding_factor="embedding_multiplier", logit_factor="logits_scaling"),
    "ministral": Family(),
    "ministral3": Family(),
    "olmo2": Family(tp_plan=_WIDE_NORMS),
    "olmo3": Family(rotary_by_layer_type=True, tp_plan=_WIDE_NORMS),
    "phi3": Family(tp_plan=(("self_attn.qkv_proj", FUSED_HEADS), ("self_attn.o_proj", ROWS), *_FUSED_MLP)),
    "seed_oss": Family(),
    "smollm3": Family(),
    "starcoder2": Family(),
    "youtu": Family(tp_plan=_LATENT_ATTENTION),
    "cohere2_moe": replace(_SOFTMAX_MIXTURE, logit_factor="logit_scale", computes_in_fp32=True),
    "deepseek_v2": replace(_SOFTMAX_MIXTURE, computes_in_fp32=True, tp_plan=_LATENT_ATTENTION),
    "dots1": _BIASED_MIXTURE,
    "exaone_moe": replace(_BIASED_MIXTURE, renamed=((r"\.mlp\.gate\.e_score", ".mlp.e_score"),)),
    "flex_olmo": replace(_SOFTMAX_MIXTURE, tp_plan=_WIDE_NORMS),
    "ernie4_5_moe": replace(
        _BIASED_MIXTURE,
        router_bias="gate.moe_statics.e_score_correction_bias",
        fp32_modules=("mlp.gate",),
        renamed=((r"\.mlp\.gate\.moe_statics\.", ".mlp.moe_statics."),),
    ),
    "glm4_moe": replace(_BIASED_MIXTURE, tp_plan=_NORMS_OF_HEADS),
    "glm4_moe_lite": replace(_BIASED_MIXTURE, tp_plan=(*_LATENT_ATTENTION, *_SHARED_EXPERTS)),
    "granitemoe": _GRANITE_MIXTURE,
    "granitemoeshared": _GRANITE_MIXTURE,
    "hunyuan_v1_moe": replace(
        _SOFTMAX_MIXTURE, computes_in_fp32=True, fp32_modules=("mlp.gate",), tp_plan=(*_HUNYUAN, *_SHARED_EXPERTS)
    ),
    "hy_v3": replace(
        _BIASED_MIXTURE,
        router_bias="e_score_correction_bias",
        renamed=(
            (r"\.mlp\.gate\.weight", ".mlp.router.gate.weight"),
            (r"\.mlp\.e_score_correction_bias", ".mlp.expert_bias"),
            (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
        ),
    ),
    "mimo_v2_flash": replace(
        _BIASED_MIXTURE,
        has_sinks=True,
        rotary_by_layer_type=True,
        tp_plan=_SINKS,
        renamed=((r"\.self_attn\.sinks", ".self_attn.attention_sink_bias"),),
    ),
    "minimax_m2": replace(
        _BIASED_MIXTURE, experts=_MIXTRAL_NAMES, router_bias="e_score_correction_bias", tp_plan=_WIDE_NORMS
    ),
    "olmoe": replace(_SOFTMAX_MIXTURE, tp_plan=_WIDE_NORMS),
    "qwen2_moe": _SOFTMAX_MIXTURE,
    "solar_open": _BIASED_MIXTURE,
    "qwen3_next": replace(_SOFTMAX_MIXTURE, **_DELTA_NET, tp_plan=(*_DELTA_NET_PLAN, *_SHARED_EXPERTS)),
    "qwen3_5_text": Family(**_DELTA_NET, tp_plan=_DELTA_NET_PLAN, rotary_axes=3),
    "qwen3_5_moe_text": replace(
        _SOFTMAX_MIXTURE, **_DELTA_NET, tp_plan=(*_DELTA_NET_PLAN, *_SHARED_EXPERTS), rotary_axes=3
    ),
    "qwen2_5_vl_text": Family(is_part=True, rotary_axes=3),
    "qwen2_5_omni_text": Family(is_part=True, rotary_axes=3),
    "qwen3_vl_text": Family(is_part=True, rotary_axes=3, tp_plan=(*_ATTENTION, *_NORMS_OF_HEADS, *_MLP)),
    "qwen3_vl_moe_text": replace(
        _SOFTMAX_MIXTURE,
        is_part=True,
        rotary_axes=3,
        experts=None,
        transposes_experts=True,
        files_turn_experts=True,
        tp_plan=(*_ATTENTION, *_NORMS_OF_HEADS),
    ),
    **{name: Family(multimodal=encoders) for name, encoders in MULTIMODAL_FAMILIES.items()},
    "gemma3": Family(multimodal=MULTIMODAL_FAMILIES["gemma3"], computes_in_fp32=True),
    "qwen3_vl_moe": Family(multimodal=MULTIMODAL_FAMILIES["qwen3_vl_moe"], transposes_experts=True),
}

_OTHER_NAMES = (
    # Of transformers 4, which are on the hub.
    ("llava", "4", r"^vision_tower\.vision_model\.", ("model.vision_tower.", "vision_tower.vision_model.")),
    ("gemma3", "4", r"^vision_tower\.vision_model\.", ("model.vision_tower.", "vision_tower.vision_model.")),
    # transformers 5 writes other names than it finds on the hub, and reads both.
    ("qwen2_audio", "5", r"^language_model\.model\.model\.", ("model.", "language_model.model.model.")),
)
"""Families with other names in files of a release of transformers, and what differs there."""

for _name, _release, _tell_tale, _pair in _OTHER_NAMES:
    _names = MULTIMODAL_FAMILIES[_name]
    _place = next(place for place, pair in enumerate(_names.in_files) if _pair[0].startswith(pair[0]))
    FAMILIES[f"{_name} of transformers {_release}"] = Family(
        multimodal=replace(_names, in_files=(*_names.in_files[:_place], _pair, *_names.in_files[_place:])),
        names_in_files_of=_name,
        tell_tale=_tell_tale,
    )

COMPOSITES = {"qwen3_5": "text_config", "qwen3_5_moe": "text_config", "qwen2_5_omni": "thinker_config"}
"""Models of which only a part is trained, by the model_type of the whole, with the key of that part's config. All other
tensors are copied to exports as they are."""

FAMILIES["qwen2_5_omni_thinker in a whole model"] = Family(
    multimodal=replace(
        MULTIMODAL_FAMILIES["qwen2_5_omni_thinker"],
        in_files=(
            ("model.visual.", "thinker.visual."),
            ("model.audio_tower.", "thinker.audio_tower."),
            ("", "thinker."),
        ),
    ),
    names_in_files_of="qwen2_5_omni_thinker",
    tell_tale=r"^thinker\.",
)

_IN_COMPOSITES = (r"^model\.", "model.language_model.")
for _name in ("qwen3_5_text", "qwen3_5_moe_text"):
    FAMILIES[f"{_name} in a vision-language model"] = replace(
        FAMILIES[_name],
        names_in_files_of=_name,
        tell_tale=r"^model\.language_model\.",
        renamed=(*FAMILIES[_name].renamed, _IN_COMPOSITES),
    )
FAMILIES["qwen3_5_moe_text in a vision-language model, experts in one tensor"] = replace(
    FAMILIES["qwen3_5_moe_text in a vision-language model"],
    experts=None,
    tell_tale=r"^model\.language_model\..*\.mlp\.experts\.gate_up_proj$",
)

TEXT_FAMILIES = {
    name: family
    for name, family in FAMILIES.items()
    if family.multimodal is None and not family.is_part and family.names_in_files_of is None
}
