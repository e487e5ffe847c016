"""The table of what works together. Everything else is refused here, before weights load."""

from collections.abc import Callable
from dataclasses import dataclass

from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.families import FAMILIES
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.errors import InputError
from automodel_rl.parallel.schedules import SCHEDULES, refuse_schedule
from automodel_rl.parallel.stages import layers_per_stage


@dataclass(frozen=True)
class ModelDescription:
    """What the table needs to know of a model's config.

    Attributes:
        family: its `model_type`.
        num_layers, num_heads, num_kv_heads, vocab_size, mlp_size: sizes.
        num_experts: 0 for a dense model.
        attention_dropout: probability.
        has_softcap: attention scores go through a soft cap.
        has_windows: some layers have sliding windows.
        is_bidirectional: attention is not causal.
        is_quantized: the checkpoint's weights are.
    """

    family: str
    num_layers: int
    attention_dropout: float = 0.0
    num_heads: int = 1
    num_kv_heads: int = 1
    vocab_size: int = 1
    mlp_size: int = 1
    num_experts: int = 0
    has_softcap: bool = False
    has_windows: bool = False
    is_bidirectional: bool = False
    is_quantized: bool = False


Refusal = Callable[[ModelDescription, ModelConfig, ParallelConfig, MemoryConfig], str | None]


@dataclass(frozen=True)
class Rule:
    """One row: a feature, what of it works, and what to say to a config that asks for more."""

    feature: str
    supported: str
    refusal: Refusal


NEMO_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.nemo_class is not None)
MOE_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.is_moe)
TP_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.splits_over_tp)


def needs_mathematics(shape: ModelDescription) -> bool:
    """Whether attention has parts that fused kernels lack: a soft cap or sinks."""
    return shape.has_softcap or FAMILIES[shape.family].has_sinks


def _family(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> str | None:
    known = tuple(FAMILIES) if model.implementation == "transformers" else NEMO_FAMILIES
    if shape.family in known:
        return None
    return (
        f"model.path: a {shape.family!r} model with implementation {model.implementation} is not supported: "
        f"use one of {', '.join(known)}"
    )


def _quantized(
    shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig
) -> str | None:
    if not shape.is_quantized:
        return None
    return (
        "model.path: config.json has a quantization_config, and only plain weights can be trained: convert the "
        "checkpoint to bfloat16 and remove it"
    )


def _causal(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> str | None:
    if not shape.is_bidirectional:
        return None
    return "model.path: config.json has use_bidirectional_attention, and attention here is causal: use a causal model"


def _dropout(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> str | None:
    if not shape.attention_dropout:
        return None
    return (
        f"model.path: config.json has attention_dropout={shape.attention_dropout}, and attention over packed rows has "
        "none: set it to 0"
    )


def _nemo(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> str | None:
    if model.implementation == "transformers":
        return None
    if model.dtype == "float64":
        return (
            "model.dtype=float64: nemo_automodel's classes keep rotary embeddings in float32; use "
            "model.implementation=transformers or model.dtype=float32"
        )
    if parallel.tp > 1:
        return (
            f"parallel.tp={parallel.tp}: tensor parallelism splits transformers' classes only: use "
            "model.implementation=transformers"
        )
    return None


def _attention(
    shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig
) -> str | None:
    if model.attention not in ("auto", "eager") and needs_mathematics(shape):
        what = "a soft cap in" if shape.has_softcap else "sinks in"
        return f"model.attention={model.attention}: this model has {what} its attention: use model.attention=eager"
    if model.attention in ("varlen", "te") and model.dtype != "bfloat16":
        return f"model.attention={model.attention} computes in bfloat16, not {model.dtype}: use model.attention=sdpa"
    if model.attention == "te" and parallel.cp > 1 and shape.has_windows:
        # Measured with TransformerEngine 2.19 on cuDNN 9.14: no kernel for fewer queries than keys.
        return (
            f"model.attention=te with parallel.cp={parallel.cp}: TransformerEngine has no sliding windows there: use "
            "model.attention=varlen"
        )
    return None


def _schedule(
    shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig
) -> str | None:
    if parallel.pp > 1:
        return refuse_schedule(parallel)
    if parallel.virtual_stages == 1:
        return None
    return f"parallel.virtual_stages={parallel.virtual_stages} needs parallel.pp of at least 2: use virtual_stages=1"


def _replicas(
    shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig
) -> str | None:
    if parallel.dp_replicate == 1 or parallel.fsdp_size > 1:
        return None
    return (
        f"parallel.dp_replicate={parallel.dp_replicate} needs parallel.dp_shard x parallel.cp of at least 2: "
        f"use dp_shard={parallel.dp_replicate} and dp_replicate=1"
    )


def _tensor(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> str | None:
    if parallel.tp == 1:
        return None
    if not FAMILIES[shape.family].splits_over_tp:
        return (
            f"parallel.tp={parallel.tp}: the layers of a {shape.family!r} model cannot be split over tp: "
            "use tp=1, with ep, pp or cp"
        )
    sizes = {
        "attention heads": shape.num_heads,
        "key-value heads": shape.num_kv_heads,
        "tokens in the vocabulary": shape.vocab_size,
        "columns in the MLP": shape.mlp_size,
    }
    for what, size in sizes.items():
        if size % parallel.tp:
            return f"parallel.tp={parallel.tp} must divide the {size} {what}: use a smaller tp"
    return None


def _sequence_parallel(
    shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig
) -> str | None:
    if not parallel.sequence_parallel or parallel.tp > 1:
        return None
    return "parallel.sequence_parallel=true needs parallel.tp of at least 2: set it to false, or raise tp"


def _experts(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> str | None:
    if parallel.ep == 1:
        return None
    if not FAMILIES[shape.family].is_moe:
        return f"parallel.ep={parallel.ep}: a {shape.family!r} model has no experts: use ep=1"
    if parallel.fsdp_size % parallel.ep:
        return (
            f"parallel.ep={parallel.ep} must divide parallel.dp_shard x parallel.cp = {parallel.fsdp_size}, the ranks "
            "that share the experts: change one of them"
        )
    if shape.num_experts % parallel.ep:
        return f"parallel.ep={parallel.ep} must divide the model's {shape.num_experts} experts: use another ep"
    return None


def _lora(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> str | None:
    if model.lora is None or (parallel.tp == 1 and model.implementation == "transformers"):
        return None
    return "model.lora: adapters need parallel.tp=1 and model.implementation=transformers: set them, or leave lora out"


def _routers(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> str | None:
    family = FAMILIES[shape.family]
    if model.moe.aux_loss and not (family.is_moe and not family.has_router_bias):
        return f"model.moe.aux_loss={model.moe.aux_loss}: a {shape.family!r} model has no softmax router: set it to 0"
    if model.moe.bias_update_rate and not family.has_router_bias:
        return (
            f"model.moe.bias_update_rate={model.moe.bias_update_rate}: the routers of a {shape.family!r} model have no "
            "bias: set it to 0"
        )
    return None


def _recomputation(
    shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig
) -> str | None:
    splits = parallel.pp > 1 and SCHEDULES[parallel.schedule].splits_backward
    if memory.activation_checkpointing != "selective" or not splits:
        return None
    return (
        f"memory.activation_checkpointing=selective: {parallel.schedule} goes through the backward twice, which it "
        "cannot: use full, or another parallel.schedule"
    )


def _compiled(
    shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig
) -> str | None:
    if not memory.compile:
        return None
    if parallel.tp > 1:
        return f"memory.compile=true with parallel.tp={parallel.tp}: split layers cannot be compiled: set it to false"
    if parallel.pp > 1 and SCHEDULES[parallel.schedule].splits_backward:
        return (
            f"memory.compile=true: {parallel.schedule} splits the backward, which compiled layers do not allow: set it "
            "to false, or use another parallel.schedule"
        )
    return None


def _nothing(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> str | None:
    return None


RULES = (
    Rule("transformers models", ", ".join(FAMILIES), _family),
    Rule("nemo_automodel models", ", ".join(NEMO_FAMILIES) + "; bfloat16, float32; no tp", _nemo),
    Rule("quantized checkpoints", "no", _quantized),
    Rule("attention dropout, bidirectional attention", "no", lambda *given: _dropout(*given) or _causal(*given)),
    Rule("attention backends", "sdpa, eager: anywhere; varlen, te: CUDA and bfloat16", _attention),
    Rule("sliding windows", "every attention backend; te without cp", _nothing),
    Rule("soft cap, sinks", "attention eager (auto chooses it)", _nothing),
    Rule(
        "pipeline schedules",
        ", ".join(f"{name} (torch 2.13)" if rule.splits_backward else name for name, rule in SCHEDULES.items()),
        _schedule,
    ),
    Rule("layers of a stage", "any split, also uneven", _nothing),
    Rule("FSDP2 (dp_shard)", "with every other axis", _nothing),
    Rule("HSDP (dp_replicate)", "with dp_shard x cp of at least 2", _replicas),
    Rule("tied embeddings", "with every axis", _nothing),
    Rule("tensor parallel (tp)", f"{', '.join(TP_FAMILIES)}; tp divides heads, KV heads, MLP and vocabulary", _tensor),
    Rule("sequence parallel", "with tp", _sequence_parallel),
    Rule("context parallel (cp)", "every model, attention backend and schedule", _nothing),
    Rule(
        "activation checkpointing",
        "full: everywhere; selective: with schedules that do not split the backward",
        _recomputation,
    ),
    Rule("compiled layers", "without tp, with schedules that do not split the backward", _compiled),
    Rule("LoRA", "attention and MLP; with pp, cp, ep, dp", _lora),
    Rule("router auxiliary loss, bias update", "softmax routers; deepseek_v3", _routers),
    Rule("expert parallel (ep)", f"{', '.join(MOE_FAMILIES)}; ep divides experts and dp_shard x cp", _experts),
)


def check_supported(
    shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig
) -> None:
    """Raises `InputError` with the refusal of the first rule that is broken, or of a split that does not fit."""
    for rule in RULES:
        message = rule.refusal(shape, model, parallel, memory)
        if message is not None:
            raise InputError(message)
    layers_per_stage(shape.num_layers, parallel)


def table() -> str:
    """The rules as the Markdown table of README."""
    rows = [f"| {rule.feature} | {rule.supported} |" for rule in RULES]
    return "\n".join(["| feature | supported |", "|---|---|", *rows])
