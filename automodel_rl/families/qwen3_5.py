"""Qwen3.5 with images and videos, dense and with a mixture of experts: Qwen3-VL's encoder without features of earlier
layers, and a language model with Gated DeltaNet."""

from dataclasses import replace

from automodel_rl.families.file_names import TEXT_FILE_NAMES
from automodel_rl.families.multimodal import Multimodal
from automodel_rl.families.qwen3_vl import QWEN3_VL_ENCODER, VISION_IN_FILES

_ENCODER = replace(
    QWEN3_VL_ENCODER, model_types=("qwen3_5_vision",), title="Qwen3.5's encoder", projectors=("visual.merger",)
)

QWEN3_5 = Multimodal(
    encoders={"vision": (_ENCODER,)},
    file_names=tuple(replace(names, prefixes=VISION_IN_FILES) for names in TEXT_FILE_NAMES["qwen3_5_text"]),
    languages=("qwen3_5_text",),
    has_rotary_grid=True,
    interleaves_axes=True,
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    encoders={"vision": (replace(_ENCODER, model_types=("qwen3_5_moe_vision",)),)},
    file_names=tuple(replace(names, prefixes=VISION_IN_FILES) for names in TEXT_FILE_NAMES["qwen3_5_moe_text"]),
    languages=("qwen3_5_moe_text",),
)
