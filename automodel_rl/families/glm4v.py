"""GLM-4.1V and, with a mixture of experts, GLM-4.5V (arXiv:2507.01006): images of any size as patches, and rotary
positions that follow their grids."""

from dataclasses import replace

from automodel_rl.families.family import Family
from automodel_rl.families.file_names import SINGLE_EXPERTS, FileNames
from automodel_rl.families.multimodal import Multimodal
from automodel_rl.families.patch_images import FUSED_ATTENTION, PatchImages, PatchReader
from automodel_rl.families.qwen3_vl import VISION_IN_FILES
from automodel_rl.families.text import BIASED_MIXTURE, FUSED_MLP, MLP


class GlmReader(PatchReader):
    """Reads images as patches. For the pixel limits, an image counts as a video of one patch in time."""

    @property
    def limit_factor(self) -> int:
        return self.processor.temporal_patch_size

    def resized(self, height: int, width: int, factor: int) -> tuple[int, int]:
        from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize  # as in media/images.py

        time, limits = self.processor.temporal_patch_size, self.processor.size
        return smart_resize(time, height, width, time, factor, limits["shortest_edge"], limits["longest_edge"])


_ENCODER = PatchImages(
    model_types=("glm4v_vision",),
    title="GLM-4.1V's encoder",
    modules=("visual",),
    projectors=("visual.downsample", "visual.merger"),
    tp_plan=(*FUSED_ATTENTION, *MLP),
    computes_in_fp32=True,  # the interpolation of its position table
    reader=GlmReader,
)

GLM4V = Multimodal(
    encoders={"vision": (_ENCODER,)},
    file_names=(FileNames(prefixes=VISION_IN_FILES),),
    own_languages={"glm4v_text": Family(rotary_axes=3, tp_plan=FUSED_MLP)},
    has_rotary_grid=True,
)

GLM4V_MOE = replace(
    GLM4V,
    encoders={"vision": (replace(_ENCODER, model_types=("glm4v_moe_vision",), title="GLM-4.5V's encoder"),)},
    file_names=(replace(SINGLE_EXPERTS, prefixes=VISION_IN_FILES),),
    own_languages={"glm4v_moe_text": replace(BIASED_MIXTURE, rotary_axes=3)},
)
