"""Rules of text models: family, implementation, checkpoint, attention, adapters and routers."""

from automodel_rl.families.known import COMPOSITES
from automodel_rl.families.text import TEXT_FAMILIES
from automodel_rl.support.attention import ATTENTION
from automodel_rl.support.multimodal_rules import LLAVA
from automodel_rl.support.rule import Breach, Combination, Rule

NEMO_FAMILIES = tuple(name for name, family in TEXT_FAMILIES.items() if family.nemo_class is not None)
MOE_FAMILIES = tuple(name for name, family in TEXT_FAMILIES.items() if family.is_moe)
BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose scaling depends on the length of a sequence."""

ON_CUDA = tuple(name for name, limits in ATTENTION.items() if limits.needs_cuda)
ANYWHERE = tuple(name for name in ATTENTION if name not in ON_CUDA)
WITH_SOFTCAP = tuple(name for name, limits in ATTENTION.items() if limits.has_softcap)
WITH_SINKS = tuple(name for name, limits in ATTENTION.items() if limits.has_sinks)
WITHOUT_WINDOWS_OVER_CP = tuple(name for name, limits in ATTENTION.items() if not limits.has_windows_over_cp)

MIXTURE = {"description.family": "qwen3_moe", "description.num_experts": 6}
"""A mixture of experts, for examples."""

NEMO_CLASSES = {"model.implementation": "nemo_automodel"}


def _family(asked: Combination) -> str | None:
    implementation = asked.model.implementation
    known = tuple(TEXT_FAMILIES) if implementation == "transformers" else NEMO_FAMILIES
    if asked.description.family in known or asked.description.multimodal is not None:
        return None
    return (
        f"model.path: a {asked.description.family!r} model with implementation {implementation} is not supported: "
        f"use one of {', '.join(known)}"
    )


_TEXT_COMPOSITES = [name for name, part in COMPOSITES.items() if part == "text_config"]

FAMILY = Rule(
    "transformers models",
    f"{', '.join(TEXT_FAMILIES)}; the language models in {', '.join(_TEXT_COMPOSITES)}",
    _family,
    (
        Breach(
            "model.path: a 'gpt2' model with implementation transformers is not supported: use one of llama, mistral,",
            {"description.family": "gpt2"},
        ),
        Breach(
            "model.path: a 'qwen2' model with implementation nemo_automodel is not supported: use one of llama, qwen3",
            NEMO_CLASSES,
            {"description.family": "qwen2"},
        ),
    ),
)


def _nemo(asked: Combination) -> str | None:
    if asked.model.implementation == "transformers":
        return None
    if asked.model.dtype == "float64":
        return (
            "model.dtype=float64: nemo_automodel's classes keep rotary embeddings in float32; use "
            "model.implementation=transformers or model.dtype=float32"
        )
    if asked.parallel.tp > 1:
        return (
            f"parallel.tp={asked.parallel.tp}: tensor parallelism splits transformers' classes only: use "
            "model.implementation=transformers"
        )
    if asked.family.is_moe and asked.model.moe.aux_loss:
        return (
            f"model.moe.aux_loss={asked.model.moe.aux_loss}: routers of nemo_automodel's mixtures do not give the "
            "scores that it needs: use model.implementation=transformers"
        )
    if asked.family.is_moe and asked.description.has_windows and not asked.family.has_sinks:
        return (
            f"model.implementation=nemo_automodel: its class of {asked.description.family} models has no sliding "
            "windows: use transformers"
        )
    return None


NEMO = Rule(
    "nemo_automodel models",
    f"{', '.join(NEMO_FAMILIES)}; bfloat16, float32; no tp, no LoRA; mixtures without auxiliary loss",
    _nemo,
    (
        Breach(
            "model.moe.aux_loss=0.1: routers of nemo_automodel's mixtures do not give the scores",
            {"model.moe.aux_loss": 0.1},
            {**NEMO_CLASSES, **MIXTURE},
        ),
        Breach(
            "model.implementation=nemo_automodel: its class of qwen3_moe models has no sliding windows",
            NEMO_CLASSES,
            {**MIXTURE, "description.has_windows": True},
        ),
        Breach("model.dtype=float64: nemo_automodel's classes keep", {"model.dtype": "float64"}, NEMO_CLASSES),
        Breach("parallel.tp=2: tensor parallelism splits transformers' classes", NEMO_CLASSES, {"parallel.tp": 2}),
    ),
)


def _quantized(asked: Combination) -> str | None:
    method = asked.description.quantization
    if method in ("", *QUANTIZATIONS):
        return None
    return (
        f"model.path: the weights are quantized by {method!r}, and only {', '.join(QUANTIZATIONS)} can be read: "
        "convert the checkpoint to bfloat16 and remove quantization_config from config.json"
    )


QUANTIZATIONS = ("fp8", "mxfp4")

QUANTIZED = Rule(
    "quantized checkpoints",
    f"{', '.join(QUANTIZATIONS)}: read as plain weights, trained and exported in model.dtype; vLLM needs a plain copy",
    _quantized,
    (Breach("model.path: the weights are quantized by 'awq', and only", {"description.quantization": "awq"}),),
)


def _noise(asked: Combination) -> str | None:
    for name, size in asked.description.noise.items():
        return (
            f"model.path: config.json has {name}={size}, and training here is not random, so that log-probabilities "
            "are those that are trained: set it to 0"
        )
    return None


NOISE = Rule(
    "dropout of any kind, router jitter",
    "no",
    _noise,
    (Breach("model.path: config.json has resid_pdrop=0.1", {"description.noise": {"resid_pdrop": 0.1}}),),
)


def _bidirectional(asked: Combination) -> str | None:
    if asked.description.is_bidirectional:
        return "model.path: config.json has use_bidirectional_attention, and attention here is causal: use a causal one"
    return None


BIDIRECTIONAL = Rule(
    "bidirectional attention",
    "no",
    _bidirectional,
    (Breach("model.path: config.json has use_bidirectional_attention", {"description.is_bidirectional": True}),),
)


def _rotary(asked: Combination) -> str | None:
    # As in transformers, "dynamic" may be a part of the name.
    wrong = next((kind for kind in asked.description.rope_types if any(name in kind for name in BY_LENGTH)), None)
    if wrong is None:
        return None
    return (
        f"model.path: config.json has rope_type={wrong}, whose frequencies depend on the length of a sequence, and all "
        "sequences of a microbatch have the same: use a checkpoint with another rope_type, such as yarn or linear"
    )


ROTARY = Rule(
    "rotary embeddings",
    f"every rope_type but {', '.join(BY_LENGTH)}",
    _rotary,
    (
        Breach("model.path: config.json has rope_type=dynamic", {"description.rope_types": ("dynamic",)}),
        Breach("model.path: config.json has rope_type=longrope", {"description.rope_types": ("default", "longrope")}),
    ),
)


def _attention(asked: Combination) -> str | None:
    name, dtype, cp = asked.model.attention, asked.model.dtype, asked.parallel.cp
    if name == "auto":
        return None
    limits = ATTENTION[name]
    if asked.description.has_softcap and not limits.has_softcap:
        return f"model.attention={name}: this model has a soft cap in its attention: use {' or '.join(WITH_SOFTCAP)}"
    if asked.family.has_sinks and not limits.has_sinks:
        return f"model.attention={name}: this model has sinks in its attention: use {' or '.join(WITH_SINKS)}"
    if limits.needs_cuda and dtype != "bfloat16":
        return f"model.attention={name} computes in bfloat16, not {dtype}: use model.attention=sdpa"
    if cp > 1 and asked.description.has_windows and not limits.has_windows_over_cp:
        return f"model.attention={name} with parallel.cp={cp}: it has no sliding windows there: use varlen"
    return None


ATTENTION_BACKENDS = Rule(
    "attention backends",
    f"{', '.join(ANYWHERE)}: anywhere; {', '.join(ON_CUDA)}: CUDA and bfloat16",
    _attention,
    (
        Breach(
            "model.attention=sdpa: this model has a soft cap in its attention: use eager",
            {"model.attention": "sdpa"},
            {"description.family": "gemma2", "description.has_softcap": True},
        ),
        Breach(
            "model.attention=sdpa: this model has sinks in its attention: use eager or varlen or fa3",
            {"model.attention": "sdpa"},
            {"description.family": "gpt_oss"},
        ),
        Breach(
            "model.attention=te computes in bfloat16, not float32",
            {"model.dtype": "float32"},
            {"model.attention": "te"},
        ),
        Breach(
            "model.attention=varlen computes in bfloat16, not float64",
            {"model.attention": "varlen"},
            {"model.dtype": "float64"},
        ),
        Breach(
            "model.attention=te with parallel.cp=2: it has no sliding windows there: use varlen",
            {"parallel.cp": 2},
            {"model.attention": "te", "description.has_windows": True},
        ),
    ),
)


def _float8(asked: Combination) -> str | None:
    recipe, model = asked.model.fp8, asked.model
    if recipe is None:
        return None
    if model.dtype != "bfloat16":
        return f"model.fp8={recipe} with model.dtype={model.dtype}: fp8 layers take and give bfloat16: use that"
    if model.lora is not None:
        return f"model.fp8={recipe} with model.lora: adapters have no fp8 layers: set one of them to null"
    if asked.parallel.tp > 1:
        return f"model.fp8={recipe} with parallel.tp={asked.parallel.tp}: split layers have no fp8: use tp=1"
    if model.implementation != "transformers":
        return f"model.fp8={recipe} with model.implementation={model.implementation}: use transformers"
    if asked.description.multimodal is not None:
        return f"model.fp8={recipe}: a multimodal model has no fp8 layers: set it to null"
    return None


_FP8 = {"model.fp8": "rowwise"}

FLOAT8 = Rule(
    "fp8",
    "linear layers of text models without tp and LoRA, in bfloat16; GPUs with fp8",
    _float8,
    (
        Breach("model.fp8=rowwise with model.dtype=float32: fp8 layers take", {"model.dtype": "float32"}, _FP8),
        Breach("model.fp8=rowwise with model.lora: adapters have no", {"model.lora": {"rank": 4}}, _FP8),
        Breach("model.fp8=rowwise with parallel.tp=2: split layers", {"parallel.tp": 2}, _FP8),
        Breach("model.fp8=rowwise with model.implementation=nemo_automodel", NEMO_CLASSES, _FP8),
        Breach(
            "model.fp8=rowwise: a multimodal model has no fp8",
            _FP8,
            LLAVA,
        ),
    ),
)
WINDOWS = Rule("sliding windows", f"every attention backend; {', '.join(WITHOUT_WINDOWS_OVER_CP)} without cp")
SOFTCAP = Rule("soft cap in attention", f"attention {', '.join(WITH_SOFTCAP)} (auto chooses it)")
SINKS = Rule("sinks in attention", f"attention {', '.join(WITH_SINKS)}")
TIED = Rule("tied embeddings", "with every axis")


def _routers(asked: Combination) -> str | None:
    moe, family, name = asked.model.moe, asked.family, asked.description.family
    if moe.aux_loss and not (family.is_moe and not family.router_bias):
        return f"model.moe.aux_loss={moe.aux_loss}: a {name!r} model has no softmax router: set it to 0"
    if moe.bias_update_rate and not family.router_bias:
        return (
            f"model.moe.bias_update_rate={moe.bias_update_rate}: the routers of a {name!r} model have no "
            "bias: set it to 0"
        )
    return None


ROUTERS = Rule(
    "router auxiliary loss, bias update",
    f"softmax routers; {', '.join(name for name in MOE_FAMILIES if TEXT_FAMILIES[name].router_bias)}",
    _routers,
    (
        Breach("model.moe.aux_loss=0.1: a 'qwen3' model has no softmax router", {"model.moe": {"aux_loss": 0.1}}),
        Breach(
            "model.moe.aux_loss=0.1: a 'deepseek_v3' model has no softmax router",
            {"model.moe": {"aux_loss": 0.1}},
            {"description.family": "deepseek_v3", "description.num_experts": 8},
        ),
        Breach(
            "model.moe.bias_update_rate=0.1: the routers of a 'qwen3_moe' model have no bias: set it to 0",
            {"model.moe": {"bias_update_rate": 0.1}},
            MIXTURE,
        ),
    ),
)
