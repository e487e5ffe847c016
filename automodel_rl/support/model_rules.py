"""Rules for text models: family, checkpoint, attention, adapters and routers."""

from automodel_rl.families.classifier import classifier_families
from automodel_rl.families.known import COMPOSITES, MULTIMODAL_FAMILIES, SAME_AS, TEXT
from automodel_rl.families.text import TEXT_FAMILIES
from automodel_rl.support import features as f
from automodel_rl.support.attention import ATTENTION
from automodel_rl.support.combination import Combination
from automodel_rl.support.rule import Rule

NEMO_FAMILIES = tuple(name for name, family in TEXT_FAMILIES.items() if family.nemo_class is not None)
MOE_FAMILIES = tuple(name for name, family in TEXT_FAMILIES.items() if family.is_moe)
BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary embeddings whose scaling depends on the sequence length."""

ON_CUDA = tuple(name for name, limits in ATTENTION.items() if limits.needs_cuda)
ANYWHERE = tuple(name for name in ATTENTION if name not in ON_CUDA)
WITH_SOFTCAP = tuple(name for name, limits in ATTENTION.items() if limits.has_softcap)
WITH_SINKS = tuple(name for name, limits in ATTENTION.items() if limits.has_sinks)
WITHOUT_WINDOWS_OVER_CP = tuple(name for name, limits in ATTENTION.items() if not limits.has_windows_over_cp)


def _family(combination: Combination) -> str | None:
    implementation = combination.model.implementation
    known = tuple(TEXT_FAMILIES) if implementation == "transformers" else NEMO_FAMILIES
    if combination.description.family in known or combination.description.multimodal is not None:
        return None
    return (
        f"model.path: a {combination.description.family!r} model with implementation {implementation} is not "
        f"supported: use one of {', '.join(known)}"
    )


_TEXT_COMPOSITES = [name for name, part in COMPOSITES.items() if part == TEXT]
_WITH_TEXT_MODELS = [
    name for name, family in MULTIMODAL_FAMILIES.items() if {*family.known_languages} & {*TEXT_FAMILIES}
]

FAMILY = Rule(
    "transformers models",
    f"{', '.join(TEXT_FAMILIES)}; {', '.join(f'{name} as {family}' for name, family in SAME_AS.items())}; the language "
    f"models in {', '.join(_TEXT_COMPOSITES)}, and with model.text_only those "
    f"in {', '.join(_WITH_TEXT_MODELS)}",
    _family,
)


NEMO = Rule(
    "nemo_automodel models",
    ", ".join(NEMO_FAMILIES),
    features=(f.NEMO, f.NEMO_MIXTURE),
)


def _quantized(combination: Combination) -> str | None:
    method = combination.description.quantization
    if method in ("", *QUANTIZATIONS):
        return None
    return (
        f"model.path: the weights are quantized by {method!r}, but only {', '.join(QUANTIZATIONS)} can be read: "
        "convert the checkpoint to bfloat16 and remove quantization_config from config.json"
    )


QUANTIZATIONS = ("fp8", "mxfp4", "nf4")

QUANTIZED = Rule(
    "quantized checkpoints",
    f"{', '.join(QUANTIZATIONS)}: read as plain weights, trained and exported in model.dtype",
    _quantized,
    features=(f.QUANTIZED,),
)


def _noise(combination: Combination) -> str | None:
    for name, size in combination.description.noise.items():
        return (
            f"model.path: config.json has {name}={size}, but training here is not random, so that log-probabilities "
            "are those that are trained: set it to 0"
        )
    return None


NOISE = Rule(
    "dropout of any kind, router jitter",
    "no",
    _noise,
)


def _bidirectional(combination: Combination) -> str | None:
    if combination.description.is_bidirectional:
        return (
            "model.path: config.json has use_bidirectional_attention, but attention here is causal: use a causal model"
        )
    return None


BIDIRECTIONAL = Rule(
    "bidirectional attention",
    "no",
    _bidirectional,
)


def _rotary(combination: Combination) -> str | None:
    # As in transformers, "dynamic" may be a part of the name.
    wrong = next((kind for kind in combination.description.rope_types if any(name in kind for name in BY_LENGTH)), None)
    if wrong is None:
        return None
    return (
        f"model.path: config.json has rope_type={wrong}, whose frequencies depend on the length of a sequence, but all "
        "sequences of a microbatch share them: use a checkpoint with another rope_type, such as yarn or linear"
    )


ROTARY = Rule(
    "rotary embeddings",
    f"every rope_type but {', '.join(BY_LENGTH)}",
    _rotary,
)


def _attention(combination: Combination) -> str | None:
    name, dtype, cp = combination.model.attention, combination.model.dtype, combination.parallel.cp
    if name == "auto":
        return None
    limits = ATTENTION[name]
    if combination.description.has_softcap and not limits.has_softcap:
        return f"model.attention={name}: this model has a soft cap in its attention: use {' or '.join(WITH_SOFTCAP)}"
    if combination.family.has_sinks and not limits.has_sinks:
        return f"model.attention={name}: this model has sinks in its attention: use {' or '.join(WITH_SINKS)}"
    if limits.needs_cuda and dtype != "bfloat16":
        return f"model.attention={name} computes in bfloat16, not {dtype}: use model.attention=sdpa"
    if combination.parallel.gathers_keys and combination.description.has_windows and not limits.has_windows_over_cp:
        return f"model.attention={name} with parallel.cp={cp}: it does not support sliding windows with cp: use varlen"
    return None


ATTENTION_BACKENDS = Rule(
    "attention backends",
    f"{', '.join(ANYWHERE)}: anywhere; {', '.join(ON_CUDA)}: CUDA and bfloat16",
    _attention,
)


FLOAT8 = Rule(
    "fp8",
    "linear layers of text models; GPUs with fp8",
    features=(f.FP8,),
)
NARROW_MASTERS = Rule(
    "master weights in bfloat16",
    "adamw and adamw_8bit, every layout",
    features=(f.NARROW_MASTERS,),
)
WINDOWS = Rule("sliding windows", f"every attention backend; {', '.join(WITHOUT_WINDOWS_OVER_CP)} without cp")
SOFTCAP = Rule("soft cap in attention", f"attention {', '.join(WITH_SOFTCAP)} (auto chooses it)")
SINKS = Rule("sinks in attention", f"attention {', '.join(WITH_SINKS)}")
TIED = Rule("tied embeddings", "with every axis")


LINEAR_HEAD = Rule(
    "linear head (reward models, critics)",
    f"every layout, {', '.join(classifier_families())}: where transformers has a class ForSequenceClassification",
    features=(f.LINEAR_HEAD,),
)


def _routers(combination: Combination) -> str | None:
    moe, family, name = combination.model.moe, combination.family, combination.description.family
    if moe.aux_loss and not (family.is_moe and not family.router_bias and family.router_gives_logits):
        return f"model.moe.aux_loss={moe.aux_loss}: a {name!r} model has no softmax router: set it to 0"
    if moe.bias_update_rate and not family.router_bias:
        return (
            f"model.moe.bias_update_rate={moe.bias_update_rate}: the routers of a {name!r} model have no "
            "bias: set it to 0"
        )
    return None


def _mtp(combination: Combination) -> str | None:
    if combination.model.mtp is None:
        return None
    remedy = "remove model.mtp (exports keep its layers unchanged)"
    if not combination.family.mtp_files:
        family = combination.description.family
        return f"model.mtp: layers for multi-token prediction of {family!r} cannot be trained: {remedy}"
    if combination.model.lora is not None:
        return f"model.mtp: its layer is trained in full, but model.lora freezes it: {remedy}"
    if combination.model.implementation != "transformers":
        return f"model.mtp: only transformers' classes have its layer: {remedy}"
    if combination.model.num_labels is not None:
        return f"model.mtp: it needs the vocabulary head, which model.num_labels replaces: {remedy}"
    if combination.description.multimodal is not None:
        return f"model.mtp: it does not work with encoders: {remedy}, or train the text model with model.text_only=true"
    return None


MTP = Rule(
    "multi-token prediction (model.mtp)",
    f"{', '.join(name for name, family in TEXT_FAMILIES.items() if family.mtp_files)}: the first further layer, in "
    "addition to any loss, on every layout; not sent to generators",
    _mtp,
)


def _indexer(combination: Combination) -> str | None:
    if combination.model.indexer is None:
        return None
    if not combination.family.index_rotary:
        return f"model.indexer: a {combination.description.family!r} model has no indexers: remove it"
    if combination.model.lora is not None:
        return "model.indexer: indexers are trained in full, but model.lora freezes them: remove model.indexer"
    return None


INDEXER = Rule(
    "indexers of sparse attention (model.indexer)",
    f"{', '.join(name for name, family in TEXT_FAMILIES.items() if family.index_rotary)}: their own loss, in addition "
    "to any other, on every layout; without it they are frozen",
    _indexer,
)
ROUTERS = Rule(
    "router auxiliary loss, bias update",
    f"softmax routers; {', '.join(name for name in MOE_FAMILIES if TEXT_FAMILIES[name].router_bias)}",
    _routers,
)


def _lora(combination: Combination) -> str | None:
    lora = combination.model.lora
    if lora is None:
        return None
    if "lm_head" in lora.targets:
        return (
            "model.lora.targets: lm_head cannot have adapters, because log-probabilities read its weight: remove it, "
            "or train it in full with modules_to_save"
        )
    return None


LORA = Rule(
    "LoRA",
    "linear layers and experts of transformers models; with pp, tp, cp, ep, dp",
    _lora,
    features=(f.LORA,),
)


def _stored_base(combination: Combination) -> str | None:
    lora = combination.model.lora
    if lora is None or lora.base != "stored" or combination.description.quantization:
        return None
    return "model.lora.base=stored: the checkpoint has no quantized weights: use plain, or nf4 to quantize them"


QUANTIZED_BASE = Rule(
    "adapters on a quantized base",
    "linear layers and experts of decoder layers, without routers and indexers: nf4, with rows of multiples of 64 "
    "values (weights published in nf4 with blocks of 64 keep their codes); or as they are stored in fp8 (scales of "
    "tensors, rows, or blocks of multiples of 128 columns), MXFP4 or nf4; with pp, cp, ep, dp, and tp where ranks "
    "have whole blocks",
    _stored_base,
    features=(f.QUANTIZED_BASE,),
)
LORA_DROPOUT = Rule("dropout of adapters", "in training", features=(f.LORA_DROPOUT,))
