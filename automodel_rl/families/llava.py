"""LLaVA (arXiv:2310.03744): a CLIP, SigLIP or Pixtral encoder, and a projector to a text model."""

from dataclasses import replace

from automodel_rl.families.file_names import parts_apart
from automodel_rl.families.multimodal import TEXT_MODELS, Multimodal
from automodel_rl.families.one_size_images import CLIP_PLAN, PROJECTOR, OneSizeImages
from automodel_rl.families.row_images import RowImages

_PARTS = ("vision_tower", PROJECTOR)

PIXTRAL = RowImages(model_types=("pixtral",), title="Pixtral's encoder", modules=_PARTS, projectors=(PROJECTOR,))
CLIP = OneSizeImages(
    model_types=("clip_vision_model",),
    title="CLIP's encoder",
    modules=_PARTS,
    projectors=(PROJECTOR,),
    tp_plan=CLIP_PLAN,
    has_class_token=True,
)
SIGLIP = replace(CLIP, model_types=("siglip_vision_model",), title="SigLIP's encoder", has_class_token=False)

PARTS_APART = parts_apart("vision_tower")

OF_TRANSFORMERS_4 = replace(
    PARTS_APART,
    prefixes=(("model.vision_tower.", "vision_tower.vision_model."), *PARTS_APART.prefixes[1:]),
    identifying_pattern=r"^vision_tower\.vision_model\.",
)
"""Names written by transformers 4, which occur on the hub."""

LLAVA = Multimodal(
    encoders={"vision": (CLIP, SIGLIP, PIXTRAL)},
    file_names=(PARTS_APART, OF_TRANSFORMERS_4),
    languages=TEXT_MODELS,
)
