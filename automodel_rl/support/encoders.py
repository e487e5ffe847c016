"""Facts of multimodal families that are not in their configs: the names of their encoders, and how media stand in the
language model."""

from dataclasses import dataclass
from typing import Literal

from automodel_rl.parallel.tensor_parallel import COLUMNS, FUSED_THREE, ROWS

TPPlan = tuple[tuple[str, str], ...]
"""Names, and how tensor parallelism splits what they name."""


@dataclass(frozen=True)
class EncoderNames:
    """One encoder of a multimodal family. Names of modules are those below the model's part with the encoder.

    Attributes:
        modules: all modules of the encoder with its projectors.
        projectors: the modules that make embeddings of the language model; what comes before them is the encoder
            proper.
        tp_plan: how the encoder's linear layers split over tp, by the last two parts of their name.
        bare_matrices: parameters [inputs, outputs] that inputs are multiplied with, and that belong to no linear layer.
    """

    modules: tuple[str, ...]
    projectors: tuple[str, ...]
    tp_plan: TPPlan = ()
    bare_matrices: tuple[str, ...] = ()

    def tp_style(self, layer: str) -> str | None:
        """How a linear layer splits over tp, by its name; None if it does not."""
        return dict(self.tp_plan).get(".".join(layer.split(".")[-2:]))


@dataclass(frozen=True)
class Multimodal:
    """The encoders of a multimodal family, and how their media stand in the language model.

    Attributes:
        encoders: the encoders by the component's name, "vision" or "audio".
        in_files: pairs of the beginning of a name in the model's parts and its beginning in files. The first pair that
            fits counts.
        has_rotary_grid: whether rotary positions in the language model follow an image's grid (M-RoPE,
            arXiv:2409.12191).
        videos: how videos stand in the language model: "grid" for one grid of tokens over time, whose positions tell
            its seconds; "seconds" for patches in time that stand apart, each after a text with its seconds.
        text_follows_time: whether the text after a video goes on from its largest position in time.
        interleaves_axes: whether rotary positions in time, height and width take turns in a head's dims.
        is_bidirectional: whether tokens of an image see each other both ways in the language model.
        image_text: what chat templates write for an image, and what the model's processor puts in its place, with a
            single image token; None if templates write that token.
    """

    encoders: dict[str, EncoderNames]
    in_files: tuple[tuple[str, str], ...]
    has_rotary_grid: bool = False
    videos: Literal["", "grid", "seconds"] = ""
    text_follows_time: bool = False
    interleaves_axes: bool = False
    is_bidirectional: bool = False
    image_text: tuple[str, str] | None = None


_PARTS_APART = (
    ("model.vision_tower.", "vision_tower."),
    ("model.audio_tower.", "audio_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("", "language_model."),
)
_QWEN_ATTENTION = (("attn.qkv", FUSED_THREE), ("attn.proj", ROWS))
_QWEN_MLP = (("mlp.gate_proj", COLUMNS), ("mlp.up_proj", COLUMNS), ("mlp.down_proj", ROWS))
_QWEN3_VISION = Multimodal(
    {
        "vision": EncoderNames(
            ("visual",),
            ("visual.merger", "visual.deepstack_merger_list"),
            (*_QWEN_ATTENTION, ("mlp.linear_fc1", COLUMNS), ("mlp.linear_fc2", ROWS)),
        )
    },
    in_files=(("model.visual.", "model.visual."), ("model.", "model.language_model.")),
    has_rotary_grid=True,
    videos="seconds",
    interleaves_axes=True,
)
_CLIP_PLAN = (
    *((f"self_attn.{name}_proj", COLUMNS) for name in ("q", "k", "v")),
    ("self_attn.out_proj", ROWS),
    ("mlp.fc1", COLUMNS),
    ("mlp.fc2", ROWS),
)


def _tower(name: str, tp_plan: TPPlan = (), bare_matrices: tuple[str, ...] = ()) -> EncoderNames:
    """An encoder whose projector stands beside it."""
    modules = (f"{name}_tower", "multi_modal_projector")
    return EncoderNames(modules, ("multi_modal_projector",), tp_plan, bare_matrices)


MULTIMODAL_FAMILIES = {
    "llava": Multimodal({"vision": _tower("vision", _CLIP_PLAN)}, _PARTS_APART),
    "gemma3": Multimodal(
        {"vision": _tower("vision", _CLIP_PLAN, ("multi_modal_projector.mm_input_projection_weight",))},
        _PARTS_APART,
        is_bidirectional=True,
        image_text=("<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"),
    ),
    "mistral3": Multimodal({"vision": _tower("vision")}, _PARTS_APART),
    "qwen2_5_vl": Multimodal(
        {"vision": EncoderNames(("visual",), ("visual.merger",), (*_QWEN_ATTENTION, *_QWEN_MLP))},
        in_files=(("model.visual.", "visual."),),
        has_rotary_grid=True,
        videos="grid",
    ),
    "qwen3_vl": _QWEN3_VISION,
    "qwen3_vl_moe": _QWEN3_VISION,
    "qwen2_audio": Multimodal({"audio": _tower("audio")}, _PARTS_APART),
    "qwen2_5_omni_thinker": Multimodal(
        {
            "vision": EncoderNames(("visual",), ("visual.merger",)),
            "audio": EncoderNames(("audio_tower",), ("audio_tower.proj",)),
        },
        in_files=(("model.visual.", "visual."), ("model.audio_tower.", "audio_tower.")),
        has_rotary_grid=True,
        videos="grid",
        text_follows_time=True,
    ),
}
"""Encoders by the model_type of the whole model. All other facts are those of its language model's family."""
