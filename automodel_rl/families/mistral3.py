"""Mistral Small 3.1 and successors: Pixtral's encoder (arXiv:2410.07073), a projector that merges patches, and
Mistral's text model; in Mistral Small 4, one with latent attention and a mixture of experts."""

from dataclasses import replace

from automodel_rl.families.llava import PARTS_APART, PIXTRAL
from automodel_rl.families.multimodal import TEXT_MODELS, Multimodal
from automodel_rl.families.text import LATENT_ATTENTION, SHARED_EXPERTS, SOFTMAX_MIXTURE

MISTRAL3 = Multimodal(
    encoders={"vision": (PIXTRAL,)},
    file_names=(PARTS_APART,),
    languages=TEXT_MODELS,
    own_languages={
        "mistral4": replace(SOFTMAX_MIXTURE, computes_in_fp32=True, tp_plan=(*LATENT_ATTENTION, *SHARED_EXPERTS))
    },
)
