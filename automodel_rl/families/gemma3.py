"""Gemma 3 with images (arXiv:2503.19786): SigLIP's encoder, pooled to a fixed number of tokens, which attend to each
other in both directions in the language model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch.media import Bidirectional, Media
from automodel_rl.families.llava import OF_TRANSFORMERS_4, PARTS_APART
from automodel_rl.families.multimodal import Multimodal
from automodel_rl.families.one_size_images import CLIP_PLAN, PROJECTOR, OneSizeImages


@dataclass(frozen=True, kw_only=True)
class GemmaImages(OneSizeImages):
    """SigLIP's encoder with Gemma's projector."""

    def bidirectional(self, config: PretrainedConfig) -> Bidirectional:
        return "everywhere"

    def arguments(
        self, config: PretrainedConfig, media: Sequence[Media], token_ids: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        kinds = (token_ids == config.image_token_id).long()
        return super().arguments(config, media, token_ids, dtype) | {"token_type_ids": kinds}


GEMMA3 = Multimodal(
    encoders={
        "vision": (
            GemmaImages(
                model_types=("siglip_vision_model",),
                title="SigLIP's encoder",
                modules=("vision_tower", PROJECTOR),
                projectors=(PROJECTOR,),
                tp_plan=CLIP_PLAN,
                bare_matrices=("multi_modal_projector.mm_input_projection_weight",),
            ),
        )
    },
    file_names=(PARTS_APART, OF_TRANSFORMERS_4),
    languages=("gemma3_text",),
    image_text=("<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"),
)
