"""Mistral Small 3.1 and what followed it: Pixtral's encoder (arXiv:2410.07073), a projector that merges patches, and
Mistral's text model."""

from automodel_rl.families.llava import PARTS_APART, PIXTRAL
from automodel_rl.families.multimodal import TEXT_MODELS, Multimodal

MISTRAL3 = Multimodal(
    encoders={"vision": (PIXTRAL,)},
    file_names=(PARTS_APART,),
    languages=TEXT_MODELS,
)
