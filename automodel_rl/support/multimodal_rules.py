"""The rule for multimodal models."""

from automodel_rl.batch.media import EncoderName
from automodel_rl.config import RunConfig
from automodel_rl.families.known import MULTIMODAL_FAMILIES
from automodel_rl.families.multimodal import TEXT_MODELS, Multimodal
from automodel_rl.support import features as f
from automodel_rl.support.combination import Combination
from automodel_rl.support.rule import Rule


def _multimodal(combination: Combination) -> str | None:
    multimodal, model = combination.description.multimodal, combination.model
    if multimodal is None:
        return _without_encoder(combination)
    family, name = MULTIMODAL_FAMILIES[multimodal], f"a {multimodal!r} model"
    if combination.run is not None and _sets_pixels(combination.run) and not family.has_pixel_limits:
        return f"data.min_pixels and data.max_pixels: {name} has no image processor with limits: remove them"
    if combination.description.family not in family.known_languages:
        return (
            f"model.path: {name} with a {combination.description.family!r} language model is not supported: use one "
            f"with {', '.join(family.known_languages)}"
        )
    for component, encoder in combination.description.encoders.items():
        known = family.model_types(component)
        if encoder.kind not in known:
            return f"model.path: {name} with a {encoder.kind!r} encoder is not supported: use {', '.join(known)}"
    if problem := _names(combination, name):
        return problem
    if {*model.frozen} == {*combination.description.encoders, "projector", "language"}:
        return "model.frozen: all parts are frozen and nothing is left to train: remove one"
    layouts = {} if combination.components is None else combination.components.encoders
    found = (
        _layout(combination, family, which, layouts[which].tp) for which in combination.description.encoders if layouts
    )
    return next((problem for problem in found if problem), None)


def _sets_pixels(run: RunConfig) -> bool:
    return run.data.min_pixels is not None or run.data.max_pixels is not None


def _names(combination: Combination, name: str) -> str | None:
    """Refuses unknown encoder names, and layouts that omit an encoder."""
    known = [*combination.description.encoders]
    for other in ("vision", "audio"):
        if other in known:
            continue
        if other in combination.model.frozen:
            return f"model.frozen: {name} has no encoder {other}: name {', '.join([*known, 'projector', 'language'])}"
        if combination.model.lora is not None and other in combination.model.lora.targets:
            return f"model.lora.targets: {name} has no encoder {other}: remove it"
    if combination.components is not None and [*combination.components.encoders] != known:
        return (
            f"components: {name} has {', '.join([*known, 'language'])}, but layouts are set for "
            f"{', '.join([*combination.components.encoders, 'language'])}: set one for each"
        )
    return None


def _layout(combination: Combination, family: Multimodal, which: EncoderName, tp: int) -> str | None:
    """Refuses a layout that an encoder does not support."""
    encoder = combination.description.encoders[which]
    known = next(known for known in family.encoders[which] if encoder.kind in known.model_types)
    if tp > 1 and not known.tp_plan:
        return f"components.{which}.tp={tp}: {known.title} is not split over tp: use dp_shard"
    if encoder.num_heads % tp:
        return f"components.{which}.tp={tp} must divide the encoder's {encoder.num_heads} attention heads"
    return None


def _without_encoder(combination: Combination) -> str | None:
    name = f"a {combination.description.family!r} model"
    if combination.components is not None:
        return f"components: {name} has one component: set its layout in parallel"
    lora = combination.model.lora
    if lora is not None and {"vision", "audio", "projector"} & {*lora.targets}:
        return f"model.lora.targets: {name} has no encoder: remove vision, audio and projector"
    if combination.run is not None and _sets_pixels(combination.run):
        return f"data.min_pixels and data.max_pixels: {name} reads no images: remove them"
    return f"model.frozen: {name} has no encoder: remove it" if combination.model.frozen else None


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
    f"encoders: dp_shard, dp_replicate and, except for those of {', '.join(sorted(_UNSPLIT))}, tp; LoRA on each part; "
    "videos without vLLM",
    _multimodal,
    features=(f.MULTIMODAL,),
)
