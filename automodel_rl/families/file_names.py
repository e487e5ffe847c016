"""Tensor names of text models in checkpoint files, where they differ from those in the model."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from transformers import PretrainedConfig


@dataclass(frozen=True)
class ExpertNames:
    """File names of the expert weights that transformers fuses into `...mlp.experts.gate_up_proj` and `.down_proj`.

    Attributes:
        block: file name of the model's `mlp` module.
        gate, up, down: names of a single expert's weights.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class FileNames:
    """How checkpoint files name and store a model's tensors.

    Attributes:
        experts: names of separate experts; None if files contain stacked experts as in the model, or there are no
            experts.
        prefixes: pairs of a name prefix in the model's parts and in files. The first matching pair applies.
        renamed: pairs of a pattern in model names and its replacement in files.
        cut: for model tensors that are stored as several, patterns of their names in files, each with the replacements
            for the parts and the rows of each.
        files_transpose_experts: whether some files have expert stacks [experts, outputs, inputs], which transformers
            5.18 writes, though it reads both.
        identifying_pattern: pattern of a name that occurs only in files with these names; empty for the usual names.
    """

    experts: ExpertNames | None = None
    prefixes: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    cut: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    files_transpose_experts: bool = False
    identifying_pattern: str = ""

    def fits(self, names: Iterable[str]) -> bool:
        """Whether names in files identify this naming scheme."""
        return bool(self.identifying_pattern) and any(re.search(self.identifying_pattern, name) for name in names)

    def identifying_pattern_after(self, start: str) -> str:
        """Returns `identifying_pattern` restricted to names with a prefix, given as a pattern."""
        return f"{start}.*{self.identifying_pattern}"


def parts_apart(tower: str) -> FileNames:
    """Returns the names of a multimodal model whose parts are top-level modules in files: an encoder, a projector and a
    language model. `tower` is the encoder's module."""
    apart = tuple((f"model.{part}.", f"{part}.") for part in (tower, "multi_modal_projector"))
    return FileNames(prefixes=(*apart, ("", "language_model.")))


SINGLE_EXPERTS = FileNames(ExpertNames())
"""Separate experts: the usual names of a mixture."""

_MIXTRAL = FileNames(ExpertNames("block_sparse_moe", "w1", "w3", "w2"))
_GRANITE = FileNames(
    renamed=(
        (r"\.experts\.gate_up_proj$", ".input_linear.weight"),
        (r"\.experts\.down_proj$", ".output_linear.weight"),
        (r"\.router\.weight$", ".router.layer.weight"),
    )
)
_LFM2_NORM = (r"^model\.norm\.", "model.embedding_norm.")
_DELTA_NET = FileNames(renamed=((r"\.linear_attn\.decay\.", ".linear_attn."),))
_DELTA_NET_MIXTURE = replace(SINGLE_EXPERTS, renamed=_DELTA_NET.renamed)


def in_multimodal(usual: tuple[FileNames, ...]) -> tuple[FileNames, ...]:
    """Returns the names of a language model inside the files of a multimodal model, as written by transformers 5 and
    with the parts as top-level modules. `usual` are its names in files of its own: the usual ones, then
    alternatives."""
    within, beside = r"^model\.language_model\.", r"^language_model\."
    found = []
    for names in usual:
        renamed = (*names.renamed, (r"^model\.", "model.language_model."))
        found.append(replace(names, renamed=renamed, identifying_pattern=names.identifying_pattern_after(within)))
        renamed = (*names.renamed, (r"^", "language_model."))
        found.append(replace(names, renamed=renamed, identifying_pattern=names.identifying_pattern_after(beside)))
    return tuple(found)


_CONVOLUTIONS = (".q_conv1d.", ".k_conv1d.", ".v_conv1d.")


def _of_olmo_hybrid(config: PretrainedConfig) -> tuple[FileNames, ...]:
    """Returns the names that vLLM reads, those with other norm names, and those that transformers 5.18 writes: it
    confuses the norms of layers with and without attention, and splits convolutions into three equal parts."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    third = -(-(2 * keys + values) // 3)
    of_widths, of_thirds = (
        replace(_DELTA_NET, cut=((r"\.conv1d\.", tuple(zip(_CONVOLUTIONS, rows, strict=True))),))
        for rows in ((keys, keys, values), (third, third, 2 * keys + values - 2 * third))
    )
    kinds = [kind == "linear_attention" for kind in config.layer_types]
    linear = "|".join(str(number) for number, is_linear in enumerate(kinds) if is_linear)
    others = "|".join(str(number) for number, is_linear in enumerate(kinds) if not is_linear)
    first = (r"\.input_layernorm\.", ".attention_layer_norm.")
    of_linear = (rf"\.({linear})\.post_attention_layernorm\.", r".\1.feedforward_layer_norm.")
    of_all = (r"\.post_attention_layernorm\.", ".feedforward_layer_norm.")
    return (
        of_widths,
        replace(
            of_widths, renamed=(*_DELTA_NET.renamed, first, of_linear), identifying_pattern=r"\.attention_layer_norm\."
        ),
        replace(
            of_thirds,
            renamed=(*_DELTA_NET.renamed, first, of_all),
            identifying_pattern=rf"\.({others})\.feedforward_layer_norm\.",
        ),
    )


_MTP_MODULES = {
    "layer": (),
    "mtp": (
        ("eh_proj.", "mtp.fc."),
        ("enorm.", "mtp.pre_fc_norm_embedding."),
        ("hnorm.", "mtp.pre_fc_norm_hidden."),
        ("shared_head.norm.", "mtp.norm."),
        ("", "mtp.layers.0."),
    ),
    "mimo": (
        ("shared_head.norm.", "model.mtp.layers.0.final_layernorm."),
        ("post_attention_layernorm.", "model.mtp.layers.0.pre_mlp_layernorm."),
        ("", "model.mtp.layers.0."),
    ),
}
"""Name prefixes of the MTP layer's tensors, in the layer and in files, by `Family.mtp_files`."""


def with_mtp(names: FileNames, num_layers: int, in_files: str) -> FileNames:
    """Adds the names of the MTP layer, which follows the model's `num_layers` layers. `in_files` is
    `Family.mtp_files`."""
    layer = rf"^model\.layers\.{num_layers}\."
    moved = ((layer + re.escape(own), other) for own, other in _MTP_MODULES[in_files])
    return replace(names, renamed=(*moved, *names.renamed))


def _of_kimi_linear(config: PretrainedConfig) -> tuple[FileNames, ...]:
    """Returns names with a Mixtral-style mixture, and separate convolutions of queries, keys and values."""
    rows = config.linear_num_heads * config.linear_head_dim
    renamed = (
        (r"\.self_attn\.(forget_gate|decay)\.", ".self_attn."),
        (r"\.mlp\.(gate|shared_experts)\.", r".block_sparse_moe.\1."),
    )
    cut = ((r"\.conv1d\.", tuple((name, rows) for name in _CONVOLUTIONS)),)
    return (replace(_MIXTRAL, renamed=renamed, cut=cut),)


NAMES_BY_CONFIG: dict[str, Callable[[PretrainedConfig], tuple[FileNames, ...]]] = {
    "olmo_hybrid": _of_olmo_hybrid,
    "kimi_linear": _of_kimi_linear,
}
"""Names that depend on the config, by `model_type`."""

TEXT_FILE_NAMES: dict[str, tuple[FileNames, ...]] = {
    "mixtral": (_MIXTRAL,),
    "minimax_m2": (_MIXTRAL,),
    "gpt_oss": (FileNames(),),
    "gemma4_text": (FileNames(),),
    "granitemoe": (_GRANITE,),
    "granitemoeshared": (_GRANITE,),
    "granitemoe_swa": (FileNames(),),
    "laguna": (
        replace(
            SINGLE_EXPERTS,
            renamed=(
                (r"\.mlp\.gate\.e_score", ".mlp.experts.e_score"),
                (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
            ),
        ),
    ),
    "axk1": (replace(SINGLE_EXPERTS, renamed=((r"\.mlp\.post_mlp_layernorm\.", ".post_mlp_layernorm."),)),),
    "exaone_moe": (replace(SINGLE_EXPERTS, renamed=((r"\.mlp\.gate\.e_score", ".mlp.e_score"),)),),
    "ernie4_5_moe": (replace(SINGLE_EXPERTS, renamed=((r"\.mlp\.gate\.moe_statics\.", ".mlp.moe_statics."),)),),
    "hy_v3": (
        replace(
            SINGLE_EXPERTS,
            renamed=(
                (r"\.mlp\.gate\.weight", ".mlp.router.gate.weight"),
                (r"\.mlp\.e_score_correction_bias", ".mlp.expert_bias"),
                (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
            ),
        ),
    ),
    "lfm2": (FileNames(renamed=(_LFM2_NORM,)),),
    "lfm2_moe": (FileNames(ExpertNames("feed_forward", "w1", "w3", "w2"), renamed=(_LFM2_NORM,)),),
    "granitemoehybrid": (replace(_GRANITE, renamed=(*_GRANITE.renamed, (r"\.mamba\.decay\.", ".mamba."))),),
    "falcon_h1": (
        FileNames(renamed=((r"\.mamba\.decay\.", ".mamba."), (r"^model\.norm\.", "model.final_layernorm."))),
    ),
    "nemotron_h": (
        FileNames(
            ExpertNames("mixer"),
            renamed=(
                (r"\.mixer\.decay\.", ".mixer."),
                (r"^model\.embed_tokens\.", "model.embeddings."),
                (r"^model\.norm\.", "model.norm_f."),
                (r"^model\.", "backbone."),
            ),
        ),
    ),
    "mimo_v2_flash": (replace(SINGLE_EXPERTS, renamed=((r"\.self_attn\.sinks", ".self_attn.attention_sink_bias"),)),),
    "qwen3_next": (_DELTA_NET_MIXTURE,),
    "qwen3_5_text": (_DELTA_NET,),
    "qwen3_5_moe_text": (
        _DELTA_NET_MIXTURE,
        replace(_DELTA_NET, identifying_pattern=r"\.mlp\.experts\.gate_up_proj$"),  # experts in one tensor
    ),
}
"""Names by the `model_type` of a text model: the usual ones, then alternatives. Families that are missing here use the
model's names with separate experts."""
