"""The rule of vision-language models."""

from automodel_rl.config import GRPOConfig, RunConfig
from automodel_rl.support.families import FAMILIES, TEXT_FAMILIES, VISION_FAMILIES
from automodel_rl.support.rule import Combination, Example, Rule

SEEING_FAMILIES = (
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "gemma3_text",
    *(name for name, family in FAMILIES.items() if family.is_part),
)
"""Families of language models that can have an encoder."""

ENCODERS = (
    "clip_vision_model",
    "siglip_vision_model",
    "pixtral",
    "qwen2_5_vl_vision",
    "qwen3_vl_vision",
    "qwen3_vl_moe_vision",
)

LLAVA = {
    "description.family": "llama",
    "description.vision": "llava",
    "description.encoder": "clip_vision_model",
    "description.vision_heads": 3,
}
_QWEN = {
    "description.family": "qwen2_5_vl_text",
    "description.vision": "qwen2_5_vl",
    "description.encoder": "qwen2_5_vl_vision",
}
_ON_TWO_RANKS = {"ranks": "0-1", "dp_shard": 2}
_DATA_RANKS = {"components": {"vision": _ON_TWO_RANKS, "language": _ON_TWO_RANKS}}
_STAGED_ENCODER = {"components": {"vision": {"ranks": "0-1", "pp": 2}, "language": _ON_TWO_RANKS}}
_SPLIT_ENCODER = {"components": {"vision": {"ranks": "0-1", "tp": 2}, "language": _ON_TWO_RANKS}}


def _vision(asked: Combination) -> str | None:
    vision, model = asked.description.vision, asked.model
    if vision is None:
        return _without_encoder(asked)
    name = f"a {vision!r} model"
    if isinstance(asked.run, GRPOConfig) and asked.run.rollout.has_turns:
        return f"rollout: prompts of {name} have images, and conversations have none: leave tools and environment out"
    if isinstance(asked.run, GRPOConfig) and asked.run.rollout.vllm.servers:
        return f"rollout.vllm.servers: servers get no images of {name}: let ranks start vLLM, with rollout.vllm.python"
    if isinstance(asked.run, GRPOConfig) and asked.run.rollout.generator == "vllm" and _is_bidirectional(vision):
        return f"rollout.generator=vllm: vLLM computes causal attention in images of {name}: use transformers"
    if asked.run is not None and _sets_pixels(asked.run) and not VISION_FAMILIES[vision].has_rotary_grid:
        return f"data.min_pixels and data.max_pixels: the image processor of {name} has none: leave them out"
    if asked.run is not None and asked.run.batch.microbatch_tokens == "auto":
        return f"batch.microbatch_tokens=auto: the memory of {name} depends on its images: give a number"
    if asked.description.family not in SEEING_FAMILIES:
        return (
            f"model.path: {name} with a {asked.description.family!r} language model is not supported: use one with "
            f"{', '.join(SEEING_FAMILIES)}"
        )
    encoder = asked.description.encoder
    if encoder not in ENCODERS:
        return f"model.path: {name} with a {encoder!r} encoder is not supported: use {', '.join(ENCODERS)}"
    if model.implementation != "transformers":
        return f"model.implementation={model.implementation}: {name} runs transformers' classes only: use transformers"
    if model.lora is not None and model.frozen:
        return "model.frozen with model.lora: all but adapters and modules to save is frozen: leave frozen out"
    if {*model.frozen} == {"vision", "projector", "language"}:
        return "model.frozen: all parts are frozen and nothing is left to train: leave one out"
    if asked.components is not None and (problem := _stages(asked, asked.components.vision.pp)):
        return problem
    tp = 1 if asked.components is None else asked.components.vision.tp
    if tp > 1 and model.lora is not None:
        return f"components.vision.tp={tp}: adapters need tp=1: use dp_shard"
    if tp > 1 and encoder == "pixtral":
        return f"components.vision.tp={tp}: Pixtral's encoder is not split over tp: use dp_shard"
    if asked.description.vision_heads % tp:
        return f"components.vision.tp={tp} must divide the encoder's {asked.description.vision_heads} attention heads"
    return None


def _sets_pixels(run: RunConfig) -> bool:
    return run.data.min_pixels is not None or run.data.max_pixels is not None


def _stages(asked: Combination, pp: int) -> str | None:
    layers, features = asked.description.encoder_layers, asked.description.encoder_features
    if pp > layers:
        return f"components.vision.pp={pp}: the encoder has {layers} layers: use at most {layers} stages"
    if pp > 1 and any(layer >= 0 or -layer > layers // pp + 1 for layer in features):
        return (
            f"components.vision.pp={pp}: the projector takes the output of layers {[*features]} of {layers}, and all "
            "of them must be on its stage, the last, counted from the end: use pp=1"
        )
    return None


def _is_bidirectional(vision: str) -> bool:
    return VISION_FAMILIES[vision].is_bidirectional


def _without_encoder(asked: Combination) -> str | None:
    name = f"a {asked.description.family!r} model"
    if asked.components is not None:
        return f"components: {name} has one component: give its layout in parallel"
    lora = asked.model.lora
    if lora is not None and {"vision", "projector"} & {*lora.targets}:
        return f"model.lora.targets: {name} has no encoder: leave vision and projector out"
    if asked.run is not None and _sets_pixels(asked.run):
        return f"data.min_pixels and data.max_pixels: {name} reads no images: leave them out"
    return f"model.frozen: {name} has no encoder: leave it out" if asked.model.frozen else None


VISION = Rule(
    "vision-language models",
    f"{', '.join(VISION_FAMILIES)} with {', '.join(n for n in SEEING_FAMILIES if n in TEXT_FAMILIES)} or its own; "
    "encoders of CLIP, SigLIP, Pixtral or their own; images; sft, dpo and grpo; every layout of the language model; "
    "encoder: dp_shard, dp_replicate, pp and, but for Pixtral, tp; "
    "LoRA on each part; batch.microbatch_tokens as a number; gemma3 without vLLM",
    _vision,
    (
        Example("components: a 'qwen3' model has one component: give its layout in parallel", _DATA_RANKS),
        Example("model.frozen: a 'qwen3' model has no encoder: leave it out", {"model.frozen": ["vision"]}),
        Example(
            "data.min_pixels and data.max_pixels: a 'qwen3' model reads no images: leave them out",
            {"data.max_pixels": 1000},
        ),
        Example(
            "data.min_pixels and data.max_pixels: the image processor of a 'llava' model has none",
            {"data.min_pixels": 1000},
            LLAVA,
        ),
        Example(
            "model.lora.targets: a 'qwen3' model has no encoder: leave vision and projector out",
            {"model.lora": {"targets": ["q_proj", "projector"]}},
            {"model.lora": {}},
        ),
        Example(
            "rollout: prompts of a 'llava' model have images, and conversations have none: leave tools",
            {"rollout.tools": ["math:sqrt"], "rollout.max_turns": 2},
            {**LLAVA, "algorithm": "grpo"},
        ),
        Example(
            "rollout.vllm.servers: servers get no images of a 'qwen2_5_vl' model: let ranks start vLLM",
            {"rollout.generator": "vllm", "rollout.vllm.servers": ["http://127.0.0.1:1"]},
            {**_QWEN, "algorithm": "grpo"},
        ),
        Example(
            "rollout.generator=vllm: vLLM computes causal attention in images of a 'gemma3' model: use transformers",
            {"rollout.generator": "vllm"},
            {**LLAVA, "description.family": "gemma3_text", "description.vision": "gemma3", "algorithm": "grpo"},
        ),
        Example(
            "batch.microbatch_tokens=auto: the memory of a 'llava' model depends on its images: give a number",
            {"batch.microbatch_tokens": "auto"},
            LLAVA,
        ),
        Example(
            "model.path: a 'llava' model with a 'gemma2' language model is not supported: use one with llama,",
            {"description.family": "gemma2"},
            LLAVA,
        ),
        Example(
            "model.path: a 'llava' model with a 'dinov2' encoder is not supported: use clip_vision_model",
            {"description.encoder": "dinov2"},
            LLAVA,
        ),
        Example(
            "model.implementation=nemo_automodel: a 'llava' model runs transformers' classes only: use transformers",
            {"model.implementation": "nemo_automodel"},
            LLAVA,
        ),
        Example(
            "model.frozen with model.lora: all but adapters and modules to save is frozen",
            {"model.frozen": ["vision"]},
            {**LLAVA, "model.lora": {}},
        ),
        Example(
            "components.vision.tp=2: adapters need tp=1: use dp_shard",
            _SPLIT_ENCODER,
            {**LLAVA, "description.vision_heads": 4, "model.lora": {}, **_DATA_RANKS},
        ),
        Example(
            "model.frozen: all parts are frozen and nothing is left to train: leave one out",
            {"model.frozen": ["vision", "projector", "language"]},
            {**LLAVA, "model.frozen": ["vision", "projector"]},
        ),
        Example(
            "components.vision.tp=2: Pixtral's encoder is not split over tp: use dp_shard",
            _SPLIT_ENCODER,
            {**LLAVA, "description.encoder": "pixtral", **_DATA_RANKS},
        ),
        Example(
            "components.vision.pp=2: the encoder has 1 layers: use at most 1 stages",
            _STAGED_ENCODER,
            {**LLAVA, **_DATA_RANKS},
        ),
        Example(
            "components.vision.pp=2: the projector takes the output of layers [-4] of 4, and all of them must be",
            {"description.encoder_features": (-4,)},
            {**LLAVA, "description.encoder_layers": 4, **_STAGED_ENCODER},
        ),
        Example(
            "components.vision.tp=2 must divide the encoder's 3 attention heads",
            _SPLIT_ENCODER,
            {**LLAVA, **_DATA_RANKS},
        ),
    ),
)
