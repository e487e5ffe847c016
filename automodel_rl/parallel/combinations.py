"""The table of what works together. Everything else is refused here, before weights load."""

from collections.abc import Callable
from dataclasses import dataclass

from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.errors import InputError
from automodel_rl.parallel.schedules import SCHEDULES, refuse_schedule
from automodel_rl.parallel.stages import layers_per_stage


@dataclass(frozen=True)
class ModelDescription:
    """What the table needs to know of a model's config."""

    family: str
    num_layers: int
    attention_dropout: float
    has_sliding_window: bool


@dataclass(frozen=True)
class Rule:
    """One row: a feature, what of it works, and what to say to a config that asks for more."""

    feature: str
    supported: str
    refusal: Callable[[ModelDescription, ModelConfig, ParallelConfig], str | None]


FAMILIES = ("llama", "qwen2", "qwen3")
NEMO_FAMILIES = ("llama", "qwen3")


def _family(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    known = FAMILIES if model.implementation == "transformers" else NEMO_FAMILIES
    if shape.family in known:
        return None
    return (
        f"model.path: a {shape.family!r} model with implementation {model.implementation} is not supported: "
        f"use one of {', '.join(known)}"
    )


def _window(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    if not shape.has_sliding_window:
        return None
    return "model.path: layers with sliding-window attention are not supported: use a model with full attention"


def _dropout(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    if not shape.attention_dropout:
        return None
    return (
        f"model.path: config.json has attention_dropout={shape.attention_dropout}, and attention over packed rows has "
        "none: set it to 0"
    )


def _nemo_dtype(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    if model.implementation == "transformers" or model.dtype != "float64":
        return None
    return (
        "model.dtype=float64: nemo_automodel's classes keep rotary embeddings in float32; use "
        "model.implementation=transformers or model.dtype=float32"
    )


def _varlen_dtype(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    if model.attention != "varlen" or model.dtype == "bfloat16":
        return None
    return f"model.attention=varlen computes in bfloat16, not {model.dtype}: use model.attention=sdpa"


def _schedule(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    if parallel.pp > 1:
        return refuse_schedule(parallel)
    if parallel.virtual_stages == 1:
        return None
    return f"parallel.virtual_stages={parallel.virtual_stages} needs parallel.pp of at least 2: use virtual_stages=1"


def _axis(name: str, title: str) -> Callable[[ModelDescription, ModelConfig, ParallelConfig], str | None]:
    def refusal(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig) -> str | None:
        size = getattr(parallel, name)
        return None if size == 1 else f"parallel.{name}={size}: {title} is not supported: use 1, with pp or dp_shard"

    return refusal


def _replicas(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    if parallel.dp_replicate == 1 or parallel.dp_shard > 1:
        return None
    return (
        f"parallel.dp_replicate={parallel.dp_replicate} needs parallel.dp_shard of at least 2: "
        f"use dp_shard={parallel.dp_replicate} and dp_replicate=1"
    )


RULES = (
    Rule("transformers models", ", ".join(FAMILIES), _family),
    Rule("nemo_automodel models", ", ".join(NEMO_FAMILIES) + "; bfloat16, float32", _nemo_dtype),
    Rule("sliding-window attention", "no", _window),
    Rule("attention dropout", "no", _dropout),
    Rule("varlen attention", "CUDA, bfloat16", _varlen_dtype),
    Rule(
        "pipeline schedules",
        ", ".join(f"{name} (torch 2.13)" if rule.splits_backward else name for name, rule in SCHEDULES.items()),
        _schedule,
    ),
    Rule("layers of a stage", "any split, also uneven", lambda *_: None),
    Rule("FSDP2 (dp_shard)", "yes, with or without pp", lambda *_: None),
    Rule("HSDP (dp_replicate)", "with dp_shard of at least 2", _replicas),
    Rule("tied embeddings", "yes, with or without pp", lambda *_: None),
    Rule("tensor parallel (tp)", "no", _axis("tp", "tensor parallelism")),
    Rule("context parallel (cp)", "no", _axis("cp", "context parallelism")),
    Rule("expert parallel (ep)", "no", _axis("ep", "expert parallelism")),
)


def check_supported(shape: ModelDescription, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `InputError` with the refusal of the first rule that is broken, or of a split that does not fit."""
    for rule in RULES:
        message = rule.refusal(shape, model, parallel)
        if message is not None:
            raise InputError(message)
    layers_per_stage(shape.num_layers, parallel)


def table() -> str:
    """The rules as the Markdown table of README."""
    rows = [f"| {rule.feature} | {rule.supported} |" for rule in RULES]
    return "\n".join(["| feature | supported |", "|---|---|", *rows])
