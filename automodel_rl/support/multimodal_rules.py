"""The rule of multimodal models."""

from automodel_rl.batch.media import EncoderName
from automodel_rl.config import RunConfig
from automodel_rl.families.known import MULTIMODAL_FAMILIES
from automodel_rl.families.multimodal import TEXT_MODELS, Multimodal
from automodel_rl.support.description import EncoderDescription
from automodel_rl.support.rule import Breach, Combination, Rule

LLAVA = {
    "description.family": "llama",
    "description.multimodal": "llava",
    "description.encoders": {"vision": EncoderDescription("clip_vision_model", num_heads=3)},
}
_QWEN = {
    "description.family": "qwen2_5_vl_text",
    "description.multimodal": "qwen2_5_vl",
    "description.encoders": {"vision": EncoderDescription("qwen2_5_vl_vision")},
}
_AUDIO = {
    "description.family": "qwen2",
    "description.multimodal": "qwen2_audio",
    "description.encoders": {"audio": EncoderDescription("qwen2_audio_encoder", num_heads=4)},
}
_OMNI = {
    "description.family": "qwen2_5_omni_text",
    "description.multimodal": "qwen2_5_omni_thinker",
    "description.encoders": {
        "vision": EncoderDescription("qwen2_5_omni_vision_encoder"),
        "audio": EncoderDescription("qwen2_5_omni_audio_encoder"),
    },
}
_FOUR_HEADS = {"description.encoders": {"vision": EncoderDescription("clip_vision_model", num_heads=4)}}
_ON_TWO_RANKS = {"ranks": "0-1", "dp_shard": 2}
_SPLIT = {"ranks": "0-1", "tp": 2}
_DATA_RANKS = {"components": {"vision": _ON_TWO_RANKS, "language": _ON_TWO_RANKS}}
_SPLIT_ENCODER = {"components": {"vision": _SPLIT, "language": _ON_TWO_RANKS}}
_HEARING = {"components": {"audio": _ON_TWO_RANKS, "language": _ON_TWO_RANKS}}
_SPLIT_HEARING = {"components": {"audio": _SPLIT, "language": _ON_TWO_RANKS}}


def _multimodal(asked: Combination) -> str | None:
    multimodal, model = asked.description.multimodal, asked.model
    if multimodal is None:
        return _without_encoder(asked)
    family, name = MULTIMODAL_FAMILIES[multimodal], f"a {multimodal!r} model"
    if problem := _rollouts(asked, name, family):
        return problem
    if asked.run is not None and _sets_pixels(asked.run) and not family.has_pixel_limits:
        return f"data.min_pixels and data.max_pixels: {name} has no image processor with limits: leave them out"
    if asked.run is not None and asked.run.batch.microbatch_tokens == "auto":
        return f"batch.microbatch_tokens=auto: the memory of {name} depends on its images or audio: give a number"
    if asked.description.family not in family.known_languages:
        return (
            f"model.path: {name} with a {asked.description.family!r} language model is not supported: use one with "
            f"{', '.join(family.known_languages)}"
        )
    for component, encoder in asked.description.encoders.items():
        known = family.kinds(component)
        if encoder.kind not in known:
            return f"model.path: {name} with a {encoder.kind!r} encoder is not supported: use {', '.join(known)}"
    if model.implementation != "transformers":
        return f"model.implementation={model.implementation}: {name} runs transformers' classes only: use transformers"
    if model.lora is not None and not family.has_peft_names:
        return f"model.lora: PEFT has no names for parts of {name}: train it whole, and freeze parts with model.frozen"
    if model.lora is not None and model.frozen:
        return "model.frozen with model.lora: all but adapters and modules to save is frozen: leave frozen out"
    if problem := _names(asked, name):
        return problem
    if {*model.frozen} == {*asked.description.encoders, "projector", "language"}:
        return "model.frozen: all parts are frozen and nothing is left to train: leave one out"
    layouts = {} if asked.components is None else asked.components.encoders
    found = (_layout(asked, family, which, layouts[which].tp) for which in asked.description.encoders if layouts)
    return next((problem for problem in found if problem), None)


def _sets_pixels(run: RunConfig) -> bool:
    return run.data.min_pixels is not None or run.data.max_pixels is not None


def _rollouts(asked: Combination, name: str, family: Multimodal) -> str | None:
    run = asked.generation
    if run is None:
        return None
    if run.rollout.has_turns:
        return f"rollout: prompts of {name} have media, and conversations have none: leave tools and environment out"
    generator = run.rollout.generator.kind
    if generator == "servers":
        return f"rollout.generator=servers: servers get no media of {name}: let ranks start vLLM, with kind vllm"
    if generator == "vllm" and family.is_bidirectional:
        return f"rollout.generator=vllm: vLLM computes causal attention in images of {name}: use transformers"
    if generator == "vllm" and asked.description.hides_interleaving:
        return (
            f"rollout.generator=vllm: the config of {name} has no rope_parameters.mrope_interleaved, and vLLM would "
            "turn queries and keys in another order than transformers: set it to true in config.json, in text_config"
        )
    if generator == "vllm" and "audio" in asked.description.encoders:
        return f"rollout.generator=vllm: vLLM gets no audio of {name}: use transformers"
    return None


def _names(asked: Combination, name: str) -> str | None:
    """Refuses names of encoders that the model does not have, and layouts that leave one out."""
    known = [*asked.description.encoders]
    for other in ("vision", "audio"):
        if other in known:
            continue
        if other in asked.model.frozen:
            return f"model.frozen: {name} has no encoder {other}: name {', '.join([*known, 'projector', 'language'])}"
        if asked.model.lora is not None and other in asked.model.lora.targets:
            return f"model.lora.targets: {name} has no encoder {other}: leave it out"
    if asked.components is not None and [*asked.components.encoders] != known:
        return (
            f"components: {name} has {', '.join([*known, 'language'])}, and layouts are given for "
            f"{', '.join([*asked.components.encoders, 'language'])}: give one for each"
        )
    return None


def _layout(asked: Combination, family: Multimodal, which: EncoderName, tp: int) -> str | None:
    """Refuses a layout that an encoder cannot have."""
    encoder = asked.description.encoders[which]
    known = next(known for known in family.encoders[which] if encoder.kind in known.kinds)
    if tp > 1 and asked.model.lora is not None:
        return f"components.{which}.tp={tp}: adapters need tp=1: use dp_shard"
    if tp > 1 and not known.tp_plan:
        return f"components.{which}.tp={tp}: {known.title} is not split over tp: use dp_shard"
    if encoder.num_heads % tp:
        return f"components.{which}.tp={tp} must divide the encoder's {encoder.num_heads} attention heads"
    return None


def _without_encoder(asked: Combination) -> str | None:
    name = f"a {asked.description.family!r} model"
    if asked.components is not None:
        return f"components: {name} has one component: give its layout in parallel"
    lora = asked.model.lora
    if lora is not None and {"vision", "audio", "projector"} & {*lora.targets}:
        return f"model.lora.targets: {name} has no encoder: leave vision, audio and projector out"
    if asked.run is not None and _sets_pixels(asked.run):
        return f"data.min_pixels and data.max_pixels: {name} reads no images: leave them out"
    return f"model.frozen: {name} has no encoder: leave it out" if asked.model.frozen else None


_VIDEOS = ", ".join(name for name, family in MULTIMODAL_FAMILIES.items() if family.reads_videos)
_UNSPLIT = {
    encoder.title.removesuffix("'s encoder")
    for family in MULTIMODAL_FAMILIES.values()
    for encoders in family.encoders.values()
    for encoder in encoders
    if not encoder.tp_plan
}

MULTIMODAL = Rule(
    "multimodal models",
    f"{', '.join(MULTIMODAL_FAMILIES)} with {', '.join(TEXT_MODELS)} or their own; encoders of CLIP, SigLIP, Pixtral "
    f"or their own; images and audio; videos with {_VIDEOS}; sft, dpo and grpo; every layout of the language model; "
    f"encoders: dp_shard, dp_replicate and, but for those of {', '.join(sorted(_UNSPLIT))}, tp; LoRA on each part but "
    "for Qwen2.5-Omni; batch.microbatch_tokens as a number; gemma3, audio and videos without vLLM",
    _multimodal,
    (
        Breach("components: a 'qwen3' model has one component: give its layout in parallel", _DATA_RANKS),
        Breach("model.frozen: a 'qwen3' model has no encoder: leave it out", {"model.frozen": ["vision"]}),
        Breach(
            "data.min_pixels and data.max_pixels: a 'qwen3' model reads no images: leave them out",
            {"data.max_pixels": 1000},
        ),
        Breach(
            "data.min_pixels and data.max_pixels: a 'llava' model has no image processor with limits",
            {"data.min_pixels": 1000},
            LLAVA,
        ),
        Breach(
            "model.lora.targets: a 'qwen3' model has no encoder: leave vision, audio and projector out",
            {"model.lora": {"targets": ["q_proj", "projector"]}},
            {"model.lora": {}},
        ),
        Breach(
            "rollout: prompts of a 'llava' model have media, and conversations have none: leave tools",
            {"rollout.tools": ["math:sqrt"], "rollout.max_turns": 2},
            {**LLAVA, "algorithm": "grpo"},
        ),
        Breach(
            "rollout.generator=servers: servers get no media of a 'qwen2_5_vl' model: let ranks start vLLM",
            {"rollout.generator": {"kind": "servers", "urls": ["http://127.0.0.1:1"]}},
            {**_QWEN, "algorithm": "grpo"},
        ),
        Breach(
            "rollout.generator=vllm: vLLM computes causal attention in images of a 'gemma3' model: use transformers",
            {"rollout.generator": "vllm"},
            {
                "description.family": "gemma3_text",
                "description.multimodal": "gemma3",
                "description.encoders": {"vision": EncoderDescription("siglip_vision_model")},
                "algorithm": "grpo",
            },
        ),
        Breach(
            "rollout.generator=vllm: the config of a 'qwen2_5_vl' model has no rope_parameters.mrope_interleaved",
            {"description.hides_interleaving": True},
            {**_QWEN, "rollout.generator": "vllm", "algorithm": "grpo"},
        ),
        Breach(
            "batch.microbatch_tokens=auto: the memory of a 'llava' model depends on its images or audio: give a number",
            {"batch.microbatch_tokens": "auto"},
            LLAVA,
        ),
        Breach(
            "model.path: a 'llava' model with a 'gemma2' language model is not supported: use one with llama,",
            {"description.family": "gemma2"},
            LLAVA,
        ),
        Breach(
            "model.path: a 'llava' model with a 'dinov2' encoder is not supported: use clip_vision_model",
            {"description.encoders": {"vision": EncoderDescription("dinov2")}},
            LLAVA,
        ),
        Breach(
            "model.implementation=nemo_automodel: a 'llava' model runs transformers' classes only: use transformers",
            {"model.implementation": "nemo_automodel"},
            LLAVA,
        ),
        Breach(
            "model.frozen with model.lora: all but adapters and modules to save is frozen",
            {"model.frozen": ["vision"]},
            {**LLAVA, "model.lora": {}},
        ),
        Breach(
            "components.vision.tp=2: adapters need tp=1: use dp_shard",
            _SPLIT_ENCODER,
            {
                **LLAVA,
                **_FOUR_HEADS,
                "model.lora": {},
                **_DATA_RANKS,
            },
        ),
        Breach(
            "model.frozen: all parts are frozen and nothing is left to train: leave one out",
            {"model.frozen": ["vision", "projector", "language"]},
            {**LLAVA, "model.frozen": ["vision", "projector"]},
        ),
        Breach(
            "components.vision.tp=2: Pixtral's encoder is not split over tp: use dp_shard",
            _SPLIT_ENCODER,
            {**LLAVA, "description.encoders": {"vision": EncoderDescription("pixtral")}, **_DATA_RANKS},
        ),
        Breach(
            "components.vision.tp=2 must divide the encoder's 3 attention heads",
            _SPLIT_ENCODER,
            {**LLAVA, **_DATA_RANKS},
        ),
        Breach(
            "model.lora: PEFT has no names for parts of a 'qwen2_5_omni_thinker' model: train it whole",
            {"model.lora": {}},
            _OMNI,
        ),
        Breach(
            "model.frozen: a 'qwen2_audio' model has no encoder vision: name audio, projector, language",
            {"model.frozen": ["vision"]},
            _AUDIO,
        ),
        Breach(
            "model.lora.targets: a 'llava' model has no encoder audio: leave it out",
            {"model.lora": {"targets": ["q_proj", "audio"]}},
            {**LLAVA, "model.lora": {}},
        ),
        Breach(
            "components: a 'qwen2_audio' model has audio, language, and layouts are given for vision, language",
            _DATA_RANKS,
            _AUDIO,
        ),
        Breach(
            "components.audio.tp=2: Qwen2-Audio's encoder is not split over tp: use dp_shard",
            _SPLIT_HEARING,
            {**_AUDIO, **_HEARING},
        ),
        Breach(
            "rollout.generator=vllm: vLLM gets no audio of a 'qwen2_audio' model: use transformers",
            {"rollout.generator": "vllm"},
            {**_AUDIO, "algorithm": "grpo"},
        ),
    ),
)
