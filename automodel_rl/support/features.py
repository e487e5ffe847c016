"""Features that a combination may request, each with the config text that requests it."""

from collections.abc import Callable
from dataclasses import dataclass

from automodel_rl.families.known import MULTIMODAL_FAMILIES
from automodel_rl.families.multimodal import Multimodal
from automodel_rl.support.combination import Combination


@dataclass(frozen=True)
class Feature:
    """A feature that a combination may request.

    Attributes:
        name: name in the table.
        requested_as: returns the config text with which a combination requests it; empty if it does not.
    """

    name: str
    requested_as: Callable[[Combination], str]


def _when(applies: bool, words: str) -> str:
    return words if applies else ""


def _tp(combination: Combination) -> str:
    return _when(combination.parallel.tp > 1, f"parallel.tp={combination.parallel.tp}")


def _encoder_tp(combination: Combination) -> str:
    layouts = {} if combination.components is None else combination.components.encoders
    return next((f"components.{name}.tp={layout.tp}" for name, layout in layouts.items() if layout.tp > 1), "")


def _nemo(combination: Combination) -> str:
    return _when(combination.model.implementation == "nemo_automodel", "model.implementation=nemo_automodel")


def _linear_head(combination: Combination) -> str:
    return _when(combination.model.num_labels is not None, f"model.num_labels={combination.model.num_labels}")


def _fp8(combination: Combination) -> str:
    return _when(combination.model.fp8 is not None, f"model.fp8={combination.model.fp8}")


def _lora(combination: Combination) -> str:
    return _when(combination.model.lora is not None, "model.lora")


def _lora_dropout(combination: Combination) -> str:
    lora = combination.model.lora
    return "" if lora is None or not lora.dropout else f"model.lora.dropout={lora.dropout}"


def _expert_adapters(combination: Combination) -> str:
    lora = combination.model.lora
    return "" if lora is None or not lora.has_experts else f"model.lora.targets={[*lora.targets]}"


def _saved_modules(combination: Combination) -> str:
    lora = combination.model.lora
    return "" if lora is None or not lora.modules_to_save else f"model.lora.modules_to_save={[*lora.modules_to_save]}"


def _quantized_base(combination: Combination) -> str:
    lora = combination.model.lora
    return "" if lora is None or lora.base == "plain" else f"model.lora.base={lora.base}"


def _own_nf4_base(combination: Combination) -> str:
    lora = combination.model.lora
    is_quantized_here = lora is not None and lora.base == "nf4" and combination.description.quantization != "nf4"
    return _quantized_base(combination) if is_quantized_here else ""


def _sent_plain(combination: Combination) -> str:
    method = combination.description.quantization
    return "" if method == "nf4" and _adapters_alone(combination) else _when(bool(method), f"{method} weights")


def _aux_loss(combination: Combination) -> str:
    loss = combination.model.moe.aux_loss
    return _when(bool(loss) and combination.family.is_moe, f"model.moe.aux_loss={loss}")


def _with_experts(combination: Combination) -> str:
    """Some mixture families, such as Gemma 4, also have dense models."""
    description = combination.description
    return _when(combination.family.is_moe and description.num_experts > 0, f"a {description.family!r} model")


def _windowed_mixture(combination: Combination) -> str:
    description = combination.description
    applies = combination.family.is_moe and description.has_windows and not combination.family.has_sinks
    return _when(applies, f"the sliding windows of a {description.family!r} model")


def _nemo_mixture(combination: Combination) -> str:
    return _when(combination.family.is_moe, _nemo(combination))


def _of_schedule(combination: Combination) -> str:
    return _when(combination.splits_backward, f"parallel.schedule={combination.parallel.schedule}")


def _fsdp_each(combination: Combination) -> str:
    return _when(combination.parallel.reduces_each, f"parallel.fsdp={combination.parallel.fsdp}")


def _selective(combination: Combination) -> str:
    return _when(combination.memory.recomputed == "selective", "memory.activation_checkpointing=selective")


def _mlp_tiles(combination: Combination) -> str:
    return _when(combination.memory.mlp_tile is not None, f"memory.mlp_tile={combination.memory.mlp_tile}")


def _selective_mixture(combination: Combination) -> str:
    return _when(combination.family.is_moe, _selective(combination))


def _multimodal(combination: Combination) -> Multimodal | None:
    name = combination.description.multimodal
    return None if name is None else MULTIMODAL_FAMILIES[name]


def _media(combination: Combination) -> str:
    return _when(combination.description.multimodal is not None, f"a {combination.description.multimodal!r} model")


def _unnamed_parts(combination: Combination) -> str:
    family = _multimodal(combination)
    return "" if family is None or family.has_peft_names else _media(combination)


def _bidirectional_images(combination: Combination) -> str:
    return _when(combination.description.is_bidirectional_in_images, f"images of {_media(combination)}")


def _audio(combination: Combination) -> str:
    return _when("audio" in combination.description.encoders, f"audio of {_media(combination)}")


def _hidden_interleaving(combination: Combination) -> str:
    hides = combination.description.hides_interleaving
    return _when(hides, "a config without rope_parameters.mrope_interleaved")


def _generator(kind: str) -> Callable[[Combination], str]:
    def asked_for(combination: Combination) -> str:
        run = combination.generation
        return _when(run is not None and run.rollout.generator.kind == kind, f"rollout.generator={kind}")

    return asked_for


def _conversations(combination: Combination) -> str:
    run = combination.generation
    return _when(run is not None and run.rollout.has_turns, "rollout.tools, rollout.environment or rollout.agent")


def _adapters_alone(combination: Combination) -> str:
    run = combination.generation
    return _when(run is not None and run.weight_sync.adapters == "alone", "weight_sync.adapters=alone")


def _alone_in_transformers(combination: Combination) -> str:
    return _adapters_alone(combination) and _generator("transformers")(combination)


def _alone_in_vllm(combination: Combination) -> str:
    return _adapters_alone(combination) and _when(
        bool(_generator("vllm")(combination)), "weight_sync.adapters=alone for vLLM"
    )


def _compared_logprobs(combination: Combination) -> str:
    run = combination.run
    return _when(run is not None and run.compares_logprobs, "an algorithm that compares log-probabilities")


def _auto_microbatches(combination: Combination) -> str:
    run = combination.run
    return _when(run is not None and run.batch.microbatch_tokens == "auto", "batch.microbatch_tokens=auto")


TP = Feature("tensor parallelism", _tp)
ENCODER_TP = Feature("an encoder's tensor parallelism", _encoder_tp)
SEQUENCE_PARALLEL = Feature(
    "sequence parallelism",
    lambda combination: _when(combination.parallel.sequence_parallel, "parallel.sequence_parallel=true"),
)
NEMO = Feature("nemo_automodel's classes", _nemo)
NEMO_MIXTURE = Feature("nemo_automodel's mixtures", _nemo_mixture)
FLOAT64 = Feature("float64", lambda combination: _when(combination.model.dtype == "float64", "model.dtype=float64"))
WIDE = Feature(
    "float32, float64",
    lambda combination: _when(combination.model.dtype != "bfloat16", f"model.dtype={combination.model.dtype}"),
)
FP8 = Feature("fp8", _fp8)
LINEAR_HEAD = Feature("a linear head", _linear_head)
NARROW_MASTERS = Feature(
    "master weights in bfloat16",
    lambda combination: _when(
        combination.model.master_dtype != "auto", f"model.master_dtype={combination.model.master_dtype}"
    ),
)
MUON = Feature(
    "muon",
    lambda combination: _when(
        combination.run is not None and combination.run.optimizer.name == "muon", "optimizer.name=muon"
    ),
)
LORA = Feature("LoRA", _lora)
LORA_DROPOUT = Feature("dropout of adapters", _lora_dropout)
DORA = Feature(
    "trained row magnitudes (dora)",
    lambda combination: _when(
        combination.model.lora is not None and combination.model.lora.dora, "model.lora.dora=true"
    ),
)
EXPERT_ADAPTERS = Feature("adapters of experts", _expert_adapters)
SAVED_MODULES = Feature("modules to save", _saved_modules)
QUANTIZED_BASE = Feature("a quantized base", _quantized_base)
OWN_NF4_BASE = Feature("a base in nf4 for a checkpoint that is not", _own_nf4_base)
FROZEN = Feature("frozen parts", lambda combination: _when(bool(combination.model.frozen), "model.frozen"))
AUX_LOSS = Feature("the auxiliary loss of routers", _aux_loss)
WINDOWED_MIXTURE = Feature("sliding windows of mixtures", _windowed_mixture)
SPLIT_BACKWARD = Feature("schedules that split the backward", _of_schedule)
FSDP_EACH = Feature("fsdp=reduce, reshard", _fsdp_each)
SELECTIVE = Feature("selective recomputation", _selective)
SELECTIVE_MIXTURE = Feature("selective recomputation of mixtures", _selective_mixture)
MLP_TILES = Feature("MLPs in tiles", _mlp_tiles)
COMPILED = Feature(
    "compiled layers", lambda combination: _when(combination.memory.compile is True, "memory.compile=true")
)
MIXTURE = Feature("mixtures", _with_experts)
MULTIMODAL = Feature("multimodal models", _media)
UNNAMED_PARTS = Feature(
    ", ".join(name for name, family in MULTIMODAL_FAMILIES.items() if not family.has_peft_names), _unnamed_parts
)
EXCHANGED_HEADS = Feature(
    "exchange of heads",
    lambda combination: _when(combination.parallel.cp_exchange == "all_to_all", "parallel.cp_exchange=all_to_all"),
)
BIDIRECTIONAL_IMAGES = Feature("images with bidirectional attention", _bidirectional_images)
AUDIO = Feature("audio", _audio)
HIDDEN_INTERLEAVING = Feature("interleaved M-RoPE that the config does not set", _hidden_interleaving)
QUANTIZED = Feature(
    "quantized checkpoints",
    lambda combination: _when(
        bool(combination.description.quantization), f"{combination.description.quantization} weights"
    ),
)
SENT_PLAIN = Feature("quantized checkpoints, except nf4 with adapters alone", _sent_plain)
VLLM = Feature("vLLM", _generator("vllm"))
SERVERS = Feature("vLLM servers", _generator("servers"))
JOINED = Feature("generators that join", _generator("joined"))
REPLAYED_ROUTES = Feature(
    "router replay",
    lambda combination: _when(
        combination.generation is not None and combination.generation.router_replay.enabled,
        "router_replay.enabled=true",
    ),
)
CONVERSATIONS = Feature("tools, environments and agents", _conversations)
ADAPTERS_ALONE = Feature("adapters alone in weight syncs", _adapters_alone)
ALONE_IN_TRANSFORMERS = Feature("adapters alone for transformers generators", _alone_in_transformers)
ALONE_IN_VLLM = Feature("adapters alone for vLLM", _alone_in_vllm)
COMPARED_LOGPROBS = Feature("dpo, grpo", _compared_logprobs)
AUTO_MICROBATCHES = Feature("batch.microbatch_tokens=auto", _auto_microbatches)
