"""The table of what works together: model, layout, precision and memory. All else is refused before weights load.

What must hold within one section of a config (a schedule's stages, a batch's size) is checked with that section.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.attention import ATTENTION
from automodel_rl.config.families import FAMILIES, TEXT_FAMILIES, VISION_FAMILIES, Family
from automodel_rl.config.model import MemoryConfig
from automodel_rl.config.modules import ModulesConfig
from automodel_rl.errors import InputError
from automodel_rl.parallel.pipeline.schedules import SCHEDULES, refuse_schedule
from automodel_rl.parallel.pipeline.split import layers_per_stage


@dataclass(frozen=True)
class ModelDescription:
    """What the table needs to know of a model's config.

    Attributes:
        family: its `model_type`.
        num_layers, num_heads, num_kv_heads, vocab_size, mlp_size: sizes.
        num_experts: 0 for a dense model.
        noise: what is random in training, by its key in the config, and how much of it there is.
        rope_types: how rotary embeddings are scaled, in any of the layers.
        has_softcap: attention scores go through a soft cap.
        has_windows: some layers have sliding windows.
        is_bidirectional: attention is not causal.
        is_quantized: the checkpoint's weights are.
        context: longest sequence in tokens, None where the config does not say.
        vision: the `model_type` of the whole, for the language model of a vision-language model; None for others.
        encoder: the `model_type` of its encoder.
        vision_heads: attention heads of its encoder.
    """

    family: str
    num_layers: int
    noise: dict[str, float] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ()
    num_heads: int = 1
    num_kv_heads: int = 1
    vocab_size: int = 1
    mlp_size: int = 1
    num_experts: int = 0
    has_softcap: bool = False
    has_windows: bool = False
    is_bidirectional: bool = False
    is_quantized: bool = False
    context: int | None = None
    vision: str | None = None
    encoder: str = ""
    vision_heads: int = 1


@dataclass(frozen=True)
class Combination:
    """What a config asks for: a model, how it computes, its layout, and what spares memory."""

    shape: ModelDescription
    model: ModelConfig
    parallel: ParallelConfig
    memory: MemoryConfig
    modules: ModulesConfig | None = None

    @property
    def family(self) -> Family:
        return FAMILIES[self.shape.family]

    @property
    def splits_backward(self) -> bool:
        """Whether a pipeline computes gradients of inputs and of weights at different times."""
        return self.parallel.pp > 1 and SCHEDULES[self.parallel.schedule].splits_backward


Refusal = Callable[[Combination], str | None]


@dataclass(frozen=True)
class Rule:
    """One row: a feature, what of it works, and what to say to a config that asks for more (None: nothing to ask)."""

    feature: str
    supported: str
    refusal: Refusal | None = None


NEMO_FAMILIES = tuple(name for name, family in TEXT_FAMILIES.items() if family.nemo_class is not None)
MOE_FAMILIES = tuple(name for name, family in TEXT_FAMILIES.items() if family.is_moe)
TP_FAMILIES = tuple(name for name, family in TEXT_FAMILIES.items() if family.splits_over_tp)
SEEING_FAMILIES = tuple(
    name
    for name, family in FAMILIES.items()
    if not family.is_moe and family.has_plain_norms and family.vision is None  # gemma's soft caps are not llava's
)
BY_LENGTH = ("dynamic", "longrope")
"""Scalings of rotary embeddings that are other ones for longer sequences."""

ENCODERS = ("clip_vision_model", "qwen2_5_vl_vision")
ON_CUDA = tuple(name for name, limits in ATTENTION.items() if limits.needs_cuda)
ANYWHERE = tuple(name for name in ATTENTION if name not in ON_CUDA)
WITH_MATHEMATICS = tuple(name for name, limits in ATTENTION.items() if limits.has_mathematics)
WITHOUT_WINDOWS_OVER_CP = tuple(name for name, limits in ATTENTION.items() if not limits.has_windows_over_cp)


def needs_mathematics(shape: ModelDescription) -> bool:
    """Whether attention has parts that fused kernels lack: a soft cap or sinks."""
    return shape.has_softcap or FAMILIES[shape.family].has_sinks


def _family(asked: Combination) -> str | None:
    implementation = asked.model.implementation
    known = tuple(TEXT_FAMILIES) if implementation == "transformers" else NEMO_FAMILIES
    if asked.shape.family in known or asked.shape.vision is not None:
        return None
    return (
        f"model.path: a {asked.shape.family!r} model with implementation {implementation} is not supported: "
        f"use one of {', '.join(known)}"
    )


def _vision(asked: Combination) -> str | None:
    vision, model, modules = asked.shape.vision, asked.model, asked.modules
    if vision is None:
        if modules is not None:
            return f"modules: a {asked.shape.family!r} model has one module: give its layout in parallel"
        return f"model.frozen: a {asked.shape.family!r} model has no encoder: leave it out" if model.frozen else None
    name = f"a {vision!r} model"
    if asked.shape.family not in SEEING_FAMILIES:
        return (
            f"model.path: {name} with a {asked.shape.family!r} language model is not supported: use one with "
            f"{', '.join(SEEING_FAMILIES)}"
        )
    if asked.shape.encoder not in ENCODERS:
        return f"model.path: {name} with a {asked.shape.encoder!r} encoder is not supported: use {', '.join(ENCODERS)}"
    if model.implementation != "transformers":
        return f"model.implementation={model.implementation}: {name} runs transformers' classes only: use transformers"
    if model.lora is not None:
        return f"model.lora: {name} is trained without adapters: leave lora out, and freeze parts with model.frozen"
    if {*model.frozen} == {"vision", "projector", "language"}:
        return "model.frozen: all parts are frozen and nothing is left to train: leave one out"
    tp = 1 if modules is None else modules.vision.tp
    if tp > 1 and not VISION_FAMILIES[vision].tp_plan:
        return f"modules.vision.tp={tp}: the encoder of {name} cannot be split over tp: use dp_shard"
    if asked.shape.vision_heads % tp:
        return f"modules.vision.tp={tp} must divide the encoder's {asked.shape.vision_heads} attention heads"
    return None


def _quantized(asked: Combination) -> str | None:
    if not asked.shape.is_quantized:
        return None
    return (
        "model.path: config.json has a quantization_config, and only plain weights can be trained: convert the "
        "checkpoint to bfloat16 and remove it"
    )


def _noise(asked: Combination) -> str | None:
    for name, size in asked.shape.noise.items():
        return (
            f"model.path: config.json has {name}={size}, and training here is not random, so that log-probabilities "
            "are those that are trained: set it to 0"
        )
    return None


def _bidirectional(asked: Combination) -> str | None:
    if asked.shape.is_bidirectional:
        return "model.path: config.json has use_bidirectional_attention, and attention here is causal: use a causal one"
    return None


def _rotary(asked: Combination) -> str | None:
    # As transformers tells them, "dynamic" may be a part of the name.
    wrong = next((kind for kind in asked.shape.rope_types if any(name in kind for name in BY_LENGTH)), None)
    if wrong is None:
        return None
    return (
        f"model.path: config.json has rope_type={wrong}, whose frequencies depend on the length of a sequence, and all "
        "sequences of a packed row have the same: use a checkpoint with another rope_type, such as yarn or linear"
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
    return None


def _attention(asked: Combination) -> str | None:
    name, dtype, cp = asked.model.attention, asked.model.dtype, asked.parallel.cp
    if name == "auto":
        return None
    limits = ATTENTION[name]
    if needs_mathematics(asked.shape) and not limits.has_mathematics:
        what = "a soft cap in" if asked.shape.has_softcap else "sinks in"
        return f"model.attention={name}: this model has {what} its attention: use model.attention=eager"
    if limits.needs_cuda and dtype != "bfloat16":
        return f"model.attention={name} computes in bfloat16, not {dtype}: use model.attention=sdpa"
    if cp > 1 and asked.shape.has_windows and not limits.has_windows_over_cp:
        return f"model.attention={name} with parallel.cp={cp}: it has no sliding windows there: use varlen"
    return None


def _schedule(asked: Combination) -> str | None:
    if asked.parallel.pp > 1:
        return refuse_schedule(asked.parallel)
    virtual_stages = asked.parallel.virtual_stages
    if virtual_stages == 1:
        return None
    return f"parallel.virtual_stages={virtual_stages} needs parallel.pp of at least 2: use virtual_stages=1"


def _replicas(asked: Combination) -> str | None:
    replicas = asked.parallel.dp_replicate
    if replicas == 1 or asked.parallel.fsdp_size > 1:
        return None
    return (
        f"parallel.dp_replicate={replicas} needs parallel.dp_shard x parallel.cp of at least 2: "
        f"use dp_shard={replicas} and dp_replicate=1"
    )


def _tensor(asked: Combination) -> str | None:
    tp, shape = asked.parallel.tp, asked.shape
    if tp == 1:
        return None
    if not asked.family.splits_over_tp:
        return (
            f"parallel.tp={tp}: the layers of a {shape.family!r} model cannot be split over tp: "
            "use tp=1, with ep, pp or cp"
        )
    sizes = {
        "attention heads": shape.num_heads,
        "key-value heads": shape.num_kv_heads,
        "tokens in the vocabulary": shape.vocab_size,
        "columns in the MLP": shape.mlp_size,
    }
    for what, size in sizes.items():
        if size % tp:
            return f"parallel.tp={tp} must divide the {size} {what}: use a smaller tp"
    return None


def _sequence_parallel(asked: Combination) -> str | None:
    if not asked.parallel.sequence_parallel or asked.parallel.tp > 1:
        return None
    return "parallel.sequence_parallel=true needs parallel.tp of at least 2: set it to false, or raise tp"


def _experts(asked: Combination) -> str | None:
    ep, shape = asked.parallel.ep, asked.shape
    if ep == 1:
        return None
    if not asked.family.is_moe:
        return f"parallel.ep={ep}: a {shape.family!r} model has no experts: use ep=1"
    if asked.parallel.fsdp_size % ep:
        return (
            f"parallel.ep={ep} must divide parallel.dp_shard x parallel.cp = {asked.parallel.fsdp_size}, the ranks "
            "that share the experts: change one of them"
        )
    if shape.num_experts % ep:
        return f"parallel.ep={ep} must divide the model's {shape.num_experts} experts: use another ep"
    return None


def _lora(asked: Combination) -> str | None:
    if asked.model.lora is None or (asked.parallel.tp == 1 and asked.model.implementation == "transformers"):
        return None
    return "model.lora: adapters need parallel.tp=1 and model.implementation=transformers: set them, or leave lora out"


def _routers(asked: Combination) -> str | None:
    moe, family, name = asked.model.moe, asked.family, asked.shape.family
    if moe.aux_loss and not (family.is_moe and not family.has_router_bias):
        return f"model.moe.aux_loss={moe.aux_loss}: a {name!r} model has no softmax router: set it to 0"
    if moe.bias_update_rate and not family.has_router_bias:
        return (
            f"model.moe.bias_update_rate={moe.bias_update_rate}: the routers of a {name!r} model have no "
            "bias: set it to 0"
        )
    return None


def _recomputation(asked: Combination) -> str | None:
    if asked.memory.activation_checkpointing != "selective" or not asked.splits_backward:
        return None
    return (
        f"memory.activation_checkpointing=selective: {asked.parallel.schedule} goes through the backward twice, which "
        "it cannot: use full, or another parallel.schedule"
    )


def _compiled(asked: Combination) -> str | None:
    if not asked.memory.compile:
        return None
    tp = asked.parallel.tp
    if tp > 1:
        return f"memory.compile=true with parallel.tp={tp}: split layers cannot be compiled: set it to false"
    if asked.splits_backward:
        return (
            f"memory.compile=true: {asked.parallel.schedule} splits the backward, which compiled layers do not allow: "
            "set it to false, or use another parallel.schedule"
        )
    if asked.memory.activation_checkpointing == "selective":
        return (
            "memory.compile=true with memory.activation_checkpointing=selective: compiled layers overwrite what it "
            "keeps: use full or none"
        )
    return None


RULES = (
    Rule("transformers models", ", ".join(TEXT_FAMILIES), _family),
    Rule(
        "vision-language models (sft)",
        f"{', '.join(VISION_FAMILIES)} with {', '.join(n for n in SEEING_FAMILIES if n in TEXT_FAMILIES)} or its own; "
        "CLIP's encoder or its own; images; every layout of the language model; "
        f"encoder: dp_shard, and tp with {', '.join(n for n, v in VISION_FAMILIES.items() if v.tp_plan)}; no LoRA",
        _vision,
    ),
    Rule("nemo_automodel models", f"{', '.join(NEMO_FAMILIES)}; bfloat16, float32; no tp", _nemo),
    Rule("quantized checkpoints", "no", _quantized),
    Rule("dropout of any kind, router jitter", "no", _noise),
    Rule("bidirectional attention", "no", _bidirectional),
    Rule("rotary embeddings", f"every rope_type but {', '.join(BY_LENGTH)}", _rotary),
    Rule("attention backends", f"{', '.join(ANYWHERE)}: anywhere; {', '.join(ON_CUDA)}: CUDA and bfloat16", _attention),
    Rule("sliding windows", f"every attention backend; {', '.join(WITHOUT_WINDOWS_OVER_CP)} without cp"),
    Rule("soft cap, sinks", f"attention {', '.join(WITH_MATHEMATICS)} (auto chooses it)"),
    Rule(
        "pipeline schedules",
        ", ".join(f"{name} (torch 2.13)" if rule.splits_backward else name for name, rule in SCHEDULES.items()),
        _schedule,
    ),
    Rule("layers of a stage", "any split, also uneven"),
    Rule("FSDP2 (dp_shard)", "with every other axis"),
    Rule("HSDP (dp_replicate)", "with dp_shard x cp of at least 2", _replicas),
    Rule("tied embeddings", "with every axis"),
    Rule("tensor parallel (tp)", f"{', '.join(TP_FAMILIES)}; tp divides heads, KV heads, MLP and vocabulary", _tensor),
    Rule("sequence parallel", "with tp", _sequence_parallel),
    Rule("context parallel (cp)", "every model and schedule; every attention backend, but windows with te"),
    Rule(
        "activation checkpointing",
        "full: everywhere; selective: with schedules that do not split the backward",
        _recomputation,
    ),
    Rule("compiled layers", "without tp and selective, with schedules that do not split the backward", _compiled),
    Rule("LoRA", "attention and MLP of transformers models; with pp, cp, ep, dp", _lora),
    Rule("router auxiliary loss, bias update", "softmax routers; deepseek_v3", _routers),
    Rule("router replay", f"{', '.join(MOE_FAMILIES)}; every layout, schedule and recomputation; any rollout engine"),
    Rule("expert parallel (ep)", f"{', '.join(MOE_FAMILIES)}; ep divides experts and dp_shard x cp", _experts),
)


def check_supported(
    shape: ModelDescription,
    model: ModelConfig,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    modules: ModulesConfig | None = None,
) -> None:
    """Raises `InputError` with the refusal of the first rule that is broken, or of a split that does not fit."""
    asked = Combination(shape, model, parallel, memory, modules)
    for rule in RULES:
        if rule.refusal is not None and (message := rule.refusal(asked)) is not None:
            raise InputError(message)
    layers_per_stage(shape.num_layers, parallel)


def table() -> str:
    """The rules as the Markdown table of README."""
    rows = [f"| {rule.feature} | {rule.supported} |" for rule in RULES]
    return "\n".join(["| feature | supported |", "|---|---|", *rows])
