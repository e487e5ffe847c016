"""Qwen3-VL (arXiv:2511.21631), dense and with a mixture of experts: features of earlier encoder layers are added in the
language model (DeepStack), and each patch of a video in time follows a timestamp."""

from dataclasses import replace

from automodel_rl.families.family import Family
from automodel_rl.families.file_names import FileNames
from automodel_rl.families.multimodal import Multimodal
from automodel_rl.families.patch_images import FUSED_ATTENTION, PatchImages
from automodel_rl.families.text import ATTENTION, MLP, NORMS_OF_HEADS, SOFTMAX_MIXTURE
from automodel_rl.media.videos import TimedVideoReader
from automodel_rl.parallel.tensor_parallel import COLUMNS, ROWS

QWEN3_VL_ENCODER = PatchImages(
    model_types=("qwen3_vl_vision",),
    title="Qwen3-VL's encoder",
    modules=("visual",),
    projectors=("visual.merger", "visual.deepstack_merger_list"),
    tp_plan=(*FUSED_ATTENTION, ("mlp.linear_fc1", COLUMNS), ("mlp.linear_fc2", ROWS)),
    videos=TimedVideoReader,
)
VISION_IN_FILES = (("model.visual.", "model.visual."), ("model.", "model.language_model."))
_FILE_NAMES = FileNames(prefixes=VISION_IN_FILES)

QWEN3_VL = Multimodal(
    encoders={"vision": (QWEN3_VL_ENCODER,)},
    file_names=(_FILE_NAMES,),
    own_languages={"qwen3_vl_text": Family(rotary_axes=3, tp_plan=(*ATTENTION, *NORMS_OF_HEADS, *MLP))},
    has_rotary_grid=True,
    interleaves_axes=True,
)

QWEN3_VL_MOE = replace(
    QWEN3_VL,
    encoders={"vision": (replace(QWEN3_VL_ENCODER, model_types=("qwen3_vl_moe_vision",)),)},
    file_names=(replace(_FILE_NAMES, files_transpose_experts=True),),
    own_languages={
        "qwen3_vl_moe_text": replace(
            SOFTMAX_MIXTURE, rotary_axes=3, transposes_experts=True, tp_plan=(*ATTENTION, *NORMS_OF_HEADS)
        )
    },
)
