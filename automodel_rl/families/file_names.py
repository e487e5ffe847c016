"""How the files of checkpoints name the tensors of text models, where names differ from those of the model."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from transformers import PretrainedConfig


@dataclass(frozen=True)
class ExpertNames:
    """How files name the weights that transformers fuses in `...mlp.experts.gate_up_proj` and `.down_proj`.

    Attributes:
        block: the name in files of the module that is `mlp` in the model.
        gate, up, down: the names of one expert's weights.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class FileNames:
    """How the files of a checkpoint name and store a model's tensors.

    Attributes:
        experts: names of separate experts; None if files hold the same stacks as the model, or there are no experts.
        starts: pairs of the beginning of a name in the model's parts and its beginning in files. The first pair that
            fits counts.
        renamed: patterns of names in the model and their text in files, for tensors with other names there.
        cut: patterns of names in files of tensors that are several there, one after the other, each with the text that
            takes the place of what is found and the number of rows.
        turns_experts: whether some files have stacks of experts [experts, outputs, inputs], as transformers 5.18 writes
            them, though it reads both.
        tell_tale: pattern of a name that only files with these names have; empty for the usual names.
    """

    experts: ExpertNames | None = None
    starts: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    cut: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    turns_experts: bool = False
    tell_tale: str = ""

    def fits(self, names: Iterable[str]) -> bool:
        """Whether names in files tell these names from the usual ones."""
        return bool(self.tell_tale) and any(re.search(self.tell_tale, name) for name in names)

    def tell_tale_after(self, start: str) -> str:
        """The pattern that tells these names in a part of the files.

        Args:
            start: pattern of the beginning of all names in that part.
        """
        return f"{start}.*{self.tell_tale}"


def parts_apart(tower: str) -> FileNames:
    """Names of a multimodal model whose parts stand side by side in files: an encoder, a projector, a language model.

    Args:
        tower: the name of the encoder's module.
    """
    apart = tuple((f"model.{part}.", f"{part}.") for part in (tower, "multi_modal_projector"))
    return FileNames(starts=(*apart, ("", "language_model.")))


SINGLE_EXPERTS = FileNames(ExpertNames())
"""Experts one by one: the usual names of a mixture."""

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
    """The names of a language model in the files of a multimodal model: those of transformers 5, and those of models
    whose parts stand side by side.

    Args:
        usual: its names in files of its own: the usual ones, then those that some files have.
    """
    within, beside = r"^model\.language_model\.", r"^language_model\."
    found = []
    for names in usual:
        renamed = (*names.renamed, (r"^model\.", "model.language_model."))
        found.append(replace(names, renamed=renamed, tell_tale=names.tell_tale_after(within)))
        renamed = (*names.renamed, (r"^", "language_model."))
        found.append(replace(names, renamed=renamed, tell_tale=names.tell_tale_after(beside)))
    return tuple(found)


_CONVOLUTIONS = (".q_conv1d.", ".k_conv1d.", ".v_conv1d.")


def _of_olmo_hybrid(config: PretrainedConfig) -> tuple[FileNames, ...]:
    """The names that vLLM reads, those with other names of norms, and those that transformers 5.18 writes: it takes
    norms of layers with attention for norms of the others, and cuts convolutions into three equal parts."""
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
        replace(of_widths, renamed=(*_DELTA_NET.renamed, first, of_linear), tell_tale=r"\.attention_layer_norm\."),
        replace(
            of_thirds,
            renamed=(*_DELTA_NET.renamed, first, of_all),
            tell_tale=rf"\.({others})\.feedforward_layer_norm\.",
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
"""What begins the names of the MTP layer's tensors, in the layer and in files, by `Family.mtp_files`."""


def with_mtp(names: FileNames, num_layers: int, in_files: str) -> FileNames:
    """Names of files with those of the layer for multi-token prediction.

    Args:
        names: names without it.
        num_layers: number of the model's layers; it is the one after these.
        in_files: `Family.mtp_files`.
    """
    layer = rf"^model\.layers\.{num_layers}\."
    moved = ((layer + re.escape(own), other) for own, other in _MTP_MODULES[in_files])
    return replace(names, renamed=(*moved, *names.renamed))


def _of_kimi_linear(config: PretrainedConfig) -> tuple[FileNames, ...]:
    """Names of Mixtral's kind for its mixture, and convolutions of queries, keys and values apart."""
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
"""Names that depend on a config, by its `model_type`."""

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
        replace(_DELTA_NET, tell_tale=r"\.mlp\.experts\.gate_up_proj$"),  # experts in one tensor
    ),
}
"""Names by the `model_type` of a text model: the usual ones, then those that some files have. A family that is not here
has the model's names, with experts one by one."""
