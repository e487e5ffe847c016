"""Facts about a model from its transformers config, for the table of supported combinations."""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from automodel_rl.batch.media import EncoderName
from automodel_rl.families.known import FAMILIES, language_config, multimodal_family
from automodel_rl.families.multimodal import encoder_config

KINDS_OF_LAYERS = ("layer_types", "layers_block_type")
"""Config keys for the kinds of layers."""

FULL = "full_attention"
"""Kind of layers with attention without a window."""

MIXED = ("linear_attention", "mamba", "conv")
"""Kinds of layers that mix tokens by a state or a convolution."""

WITHOUT_SCORES = (*MIXED, "mlp", "moe")
"""Kinds of layers without attention scores."""

IN_IMAGES = "vision"
"""Value of a config's `use_bidirectional_attention` that applies only to image tokens; text tokens have causal
attention."""

NOISE = re.compile("dropout|layerdrop|pdrop|jitter")
"""Pattern of config keys that make training random."""


@dataclass(frozen=True)
class EncoderDescription:
    """Facts about one encoder.

    Attributes:
        kind: its `model_type`.
        num_heads: number of attention heads.
    """

    kind: str
    num_heads: int = 1


@dataclass(frozen=True)
class ModelDescription:
    """Facts about a model that determine what is supported.

    Attributes:
        family: its `model_type`.
        num_layers, num_heads, num_kv_heads, vocab_size, mlp_size: sizes of the model. Numbers of heads are greatest
            common divisors if layers differ.
        head_dim, value_dim: dims of a head's queries and keys, and of its values.
        other_head_dims: head dims of layers of other kinds, ascending; empty if all layers are alike.
        num_experts: number of experts in a layer; 0 for a dense model.
        shared_expert_size: columns of the shared experts; 0 if there are none.
        noise: config entries above 0 that make training random.
        rope_types: scaling types of rotary embeddings, over all layers.
        num_mixer_heads: number of heads or channels to split in layers without attention scores, as a greatest common
            divisor if there are several; 0 if there are no such layers.
        shares_keys: whether layers use keys and values of earlier layers, or per-layer embeddings.
        shared_index_layers: indices of layers that reuse the previous layer's choice of keys.
        has_softcap: whether attention scores are soft-capped.
        has_windows: whether some layers have sliding windows.
        is_bidirectional: whether attention is not causal.
        is_bidirectional_in_images: whether only tokens of an image attend to each other in both directions.
        quantization: quantization method of the checkpoint's weights; empty if there is none.
        context: maximum sequence length in tokens; None if the config does not state it.
        hides_interleaving: whether rotary axes are interleaved in a head's dims without the config stating it.
        multimodal: `model_type` of the whole model if it has encoders; otherwise None.
        encoders: encoders by component, "vision" or "audio".
    """

    family: str
    num_layers: int
    noise: dict[str, float] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ()
    num_heads: int = 1
    num_kv_heads: int = 1
    vocab_size: int = 1
    mlp_size: int = 1
    head_dim: int = 1
    other_head_dims: tuple[int, ...] = ()
    value_dim: int = 1
    num_experts: int = 0
    shared_expert_size: int = 0
    num_mixer_heads: int = 0
    shares_keys: bool = False
    shared_index_layers: tuple[int, ...] = ()
    has_softcap: bool = False
    has_windows: bool = False
    is_bidirectional: bool = False
    is_bidirectional_in_images: bool = False
    quantization: str = ""
    context: int | None = None
    hides_interleaving: bool = False
    multimodal: str | None = None
    encoders: dict[EncoderName, EncoderDescription] = field(default_factory=dict)

    @property
    def lacks_sdpa(self) -> bool:
        """Whether attention has parts that torch's scaled_dot_product_attention lacks: a soft cap or sinks."""
        return self.has_softcap or FAMILIES[self.family].has_sinks


def describe_model(config: PretrainedConfig) -> ModelDescription:
    """Describes a model by its config. For an unsupported family, only the name is read."""
    whole = multimodal_family(config)
    if whole is not None:
        described = describe_model(language_config(config))
        noise = {
            f"{name}_config.{key}": size
            for name in whole.encoders
            for key, size in _noise(encoder_config(config, name).to_dict()).items()
        }
        return dataclasses.replace(
            described,
            noise=described.noise | noise,
            is_bidirectional_in_images=whole.is_bidirectional(config),
            hides_interleaving=whole.interleaves_axes and not _says_interleaved(config),
            multimodal=config.model_type,
            encoders={name: _describe_encoder(config, name) for name in whole.encoders},
        )
    if config.model_type not in FAMILIES:  # its config may have other fields
        return ModelDescription(family=config.model_type, num_layers=0)
    values = config.to_dict()
    return ModelDescription(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        noise=_noise(values),
        rope_types=tuple(kind.get("rope_type") or "default" for kind in _rotary_kinds(values)),
        num_heads=math.gcd(config.num_attention_heads, *(values.get("num_attention_heads_per_layer") or ())),
        num_kv_heads=math.gcd(
            values.get("num_key_value_heads") or config.num_attention_heads,
            values.get("swa_num_key_value_heads") or 0,
            values.get("n_groups") or 0,  # groups of Mamba-2 heads that share keys and a norm
            *(of_layer.get("num_key_value_heads") or 0 for of_layer in _layer_configs(values)),
        ),
        vocab_size=config.vocab_size,
        mlp_size=values.get("intermediate_size") or 0,
        head_dim=_head_dim(values),
        other_head_dims=_other_head_dims(values),
        shares_keys=bool(values.get("num_kv_shared_layers") or values.get("hidden_size_per_layer_input")),
        shared_index_layers=tuple(i for i, kind in enumerate(values.get("indexer_types") or ()) if kind == "shared"),
        value_dim=values.get("v_head_dim") or _head_dim(values),
        num_experts=_num_experts(values),
        shared_expert_size=_shared_expert_size(values),
        num_mixer_heads=_mixer_heads(values) if num_mixed_layers(config) else 0,
        has_softcap=values.get("attn_logit_softcapping") is not None,
        has_windows=any(layer_windows(config)),
        is_bidirectional=values.get("use_bidirectional_attention") not in (None, False, IN_IMAGES),
        quantization=_quantization(values),
        context=_context(values),
    )


def _says_interleaved(config: PretrainedConfig) -> bool:
    return any(kind.get("mrope_interleaved") for kind in _rotary_kinds(config.text_config.to_dict()))


def _describe_encoder(config: PretrainedConfig, name: str) -> EncoderDescription:
    values = encoder_config(config, name).to_dict()
    heads = ("num_attention_heads", "num_heads", "encoder_attention_heads")
    return EncoderDescription(values["model_type"], next((values[key] for key in heads if values.get(key)), 1))


def _head_dim(values: dict[str, Any]) -> int:
    """Dims of a head's queries; in multi-head latent attention, those with and without position together."""
    if values.get("qk_nope_head_dim"):
        return values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


def _layer_configs(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Config values that override the global ones in some layers."""
    return [*(values.get("per_layer_config") or {}).values()]


def _other_head_dims(values: dict[str, Any]) -> tuple[int, ...]:
    found = {of_layer.get("head_dim") or _head_dim(values) for of_layer in _layer_configs(values)}
    return tuple(sorted(found - {_head_dim(values)}))


def experts_per_token(config: PretrainedConfig) -> int:
    """Returns the number of experts per token, the maximum over all layers."""
    chosen = config.top_k_experts if "top_k_experts" in vars(config) else config.num_experts_per_tok
    return max(chosen) if isinstance(chosen, list) else chosen


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Returns the window size of each layer with attention; None for no window."""
    values = config.to_dict()
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    kinds = kinds_of_layers(config) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds if kind not in WITHOUT_SCORES]


def kinds_of_layers(config: PretrainedConfig) -> list[str]:
    """Returns the kind of each layer; [] if the config does not list them."""
    values = config.to_dict()
    return next((values[key] for key in KINDS_OF_LAYERS if values.get(key)), [])


def num_mixed_layers(config: PretrainedConfig) -> int:
    """Returns the number of layers with a state or a convolution, instead of or in addition to attention."""
    if "mamba_d_ssm" in config.to_dict():  # Falcon-H1: all of them
        return config.num_hidden_layers
    return sum(kind in MIXED for kind in kinds_of_layers(config))


def size_of_state(config: PretrainedConfig) -> int:
    """Returns the number of values in a layer's state; 0 if there is none."""
    values = config.to_dict()
    if "linear_num_value_heads" in values:
        return values["linear_num_value_heads"] * values["linear_key_head_dim"] * values["linear_value_head_dim"]
    if "linear_num_heads" in values:
        return values["linear_num_heads"] * values["linear_head_dim"] ** 2
    if "mamba_n_heads" in values:
        return values["mamba_n_heads"] * values["mamba_d_head"] * values["mamba_d_state"]
    if "mamba_num_heads" in values:
        return values["mamba_num_heads"] * values["mamba_head_dim"] * values["ssm_state_size"]
    return 0


def _mixer_heads(values: dict[str, Any]) -> int:
    heads = ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads")
    return math.gcd(*(values.get(key) or 0 for key in heads)) or values["hidden_size"]


def _context(values: dict[str, Any]) -> int | None:
    """Maximum sequence length, including the extension by scaled rotary embeddings."""
    context = values.get("max_position_embeddings")
    if context is None:
        return None
    scaled = [
        int(kind["original_max_position_embeddings"] * kind["factor"])
        for kind in _rotary_kinds(values)
        if kind.get("original_max_position_embeddings") and kind.get("factor")
    ]
    return max([context, *scaled])


def _rotary_kinds(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings of rotary embeddings, one per kind of layers if they differ."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    by_layer_type = [kind for kind in rope.values() if isinstance(kind, dict)]
    return by_layer_type or [rope]


def _noise(values: dict[str, Any]) -> dict[str, float]:
    """Entries above 0 that make training random, except those of heads that a language model does not have."""
    return {
        name: float(size)
        for name, size in values.items()
        if NOISE.search(name) and not name.startswith("classifier") and isinstance(size, int | float) and size > 0
    }


def _num_experts(values: dict[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((values[name] for name in names if values.get(name)), 0)


def _shared_expert_size(values: dict[str, Any]) -> int:
    count = values.get("n_shared_experts") or values.get("num_shared_experts") or values.get("moe_num_shared_experts")
    return values.get("shared_expert_intermediate_size") or (count or 0) * (values.get("moe_intermediate_size") or 0)


def _quantization(values: dict[str, Any]) -> str:
    settings = values.get("quantization_config") or {}
    method = settings.get("quant_method", "unnamed" if settings else "")
    if method == "bitsandbytes" and settings.get("load_in_4bit") and settings.get("bnb_4bit_quant_type") == "nf4":
        return "nf4"
    # compressed-tensors has many formats; this one is fp8 with scales.
    return "fp8" if method == "compressed-tensors" and settings.get("format") == "float-quantized" else method
