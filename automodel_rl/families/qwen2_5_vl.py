"""Qwen2.5-VL (arXiv:2502.13923): images and videos of any size, and rotary positions that follow their grids."""

from automodel_rl.families.family import Family
from automodel_rl.families.file_names import FileNames
from automodel_rl.families.multimodal import Multimodal
from automodel_rl.families.patch_images import FUSED_ATTENTION, PatchImages
from automodel_rl.families.text import MLP
from automodel_rl.media.videos import VideoReader

QWEN2_5_VL = Multimodal(
    encoders={
        "vision": (
            PatchImages(
                model_types=("qwen2_5_vl_vision",),
                title="Qwen2.5-VL's encoder",
                modules=("visual",),
                projectors=("visual.merger",),
                tp_plan=(*FUSED_ATTENTION, *MLP),
                videos=VideoReader,
            ),
        )
    },
    file_names=(FileNames(prefixes=(("model.visual.", "visual."),)),),
    own_languages={"qwen2_5_vl_text": Family(rotary_axes=3)},
    has_rotary_grid=True,
)
