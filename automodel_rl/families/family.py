"""Facts of one family of text models, or of the language models of a multimodal family."""

from dataclasses import dataclass
from typing import Any

from automodel_rl.parallel.tensor_parallel import REPLICATED, WIDE_NORM

TPPlan = tuple[tuple[str, str], ...]
"""Names, and how tensor parallelism splits what they name."""


@dataclass(frozen=True)
class Family:
    """One model family, by the `model_type` of its config. How files name its tensors is in file_names.py.

    Attributes:
        is_moe: whether it has a mixture of experts.
        block: name of a layer's mixture; empty if router and experts are the layer's own.
        router: name of the router beside the experts.
        router_bias: name, below the layer's mixture, of the bias with which a router chooses experts. It is trained by
            load (DeepSeek-V3, arXiv:2412.19437). Empty if there is none.
        router_gives_logits: whether the router's scores are those before the softmax.
        transposes_experts: whether the experts' stacked weights are [experts, inputs, outputs].
        has_square_output: whether attention's last projection takes the width of hidden states, whatever the heads.
        has_sinks: whether attention has a learned sink for each head.
        leaves_keys: whether layers leave keys and values for later layers, in a dict that all get.
        index_rotary: which dims of an indexer (model/sparse_attention.py) turn together in rotary embeddings: "halves"
            or "pairs"; empty if attention has none.
        hands_on: the argument with which a layer gets what the layer before it returns besides hidden states; empty if
            layers return nothing else.
        mtp_files: how files name the layer for multi-token prediction (model/mtp.py): "layer" for that after the last,
            "mtp" for a module of its own, "mimo" for such a module in the model; empty if it is not trained here.
        mtp_kinds: the kind of the layer's attention and of its MLP, in a model whose layers differ.
        rotary_by_layer_type: whether rotary embeddings differ between full and sliding-window layers.
        rotary_axes: number of axes of rotary positions, 3 for a language model that can read images (M-RoPE).
        token_mixer: name of how layers without attention mix tokens (model/token_mixers/known.py); empty if all have
            attention.
        hands_on_arguments: whether layers hand on all arguments to attention. If not, they get the forward of Llama's
            layers, whose modules they have.
        renamed_modules: names of modules of the body, and the usual names that they get.
        fp32_modules: names, below a layer, of modules whose weights stay in fp32.
        scales_embedding: whether the embedding module multiplies what it looks up.
        embedding_factor: key of the config with what the model multiplies embeddings with; empty if there is none.
        root_factor: key of the config with whether the model multiplies embeddings with the square root of their width.
        logit_factor, logit_divisor: the same as `embedding_factor` for what multiplies and what divides logits.
        has_plain_norms: whether RMSNorm is weight * x / rms(x), and not Gemma's (1 + weight).
        computes_in_fp32: whether parts of it compute in fp32 whatever the dtype, so that float64 is not exact.
        tp_plan: how tensor parallelism splits modules or parameters of a layer, by their names below it, where
            transformers' own plan for the model says nothing or says what this package does not do.
        nemo_class: module and name of nemo_automodel's own class, if this package can run it.
    """

    is_moe: bool = False
    block: str = "mlp"
    router: str = "gate"
    router_bias: str = ""
    router_gives_logits: bool = True
    transposes_experts: bool = False
    has_square_output: bool = False
    has_sinks: bool = False
    leaves_keys: bool = False
    index_rotary: str = ""
    hands_on: str = ""
    mtp_files: str = ""
    mtp_kinds: tuple[str, str] = ("full_attention", "sparse")
    rotary_by_layer_type: bool = False
    rotary_axes: int = 1
    token_mixer: str = ""
    hands_on_arguments: bool = True
    renamed_modules: tuple[tuple[str, str], ...] = ()
    fp32_modules: tuple[str, ...] = ()
    scales_embedding: bool = False
    embedding_factor: str = ""
    root_factor: str = ""
    logit_factor: str = ""
    logit_divisor: str = ""
    has_plain_norms: bool = True
    computes_in_fp32: bool = False
    tp_plan: TPPlan = ()
    nemo_class: tuple[str, str] | None = None

    def factor_of_embeddings(self, values: dict[str, Any]) -> float:
        """What the model multiplies embeddings with, besides the embedding module.

        Args:
            values: the config's entries.
        """
        root = values["hidden_size"] ** 0.5 if values.get(self.root_factor) else 1.0
        return root * values.get(self.embedding_factor, 1.0)

    def is_exact(self, tp: int) -> bool:
        """Whether a float64 model of the family computes in float64, or rounds to fp32 as transformers does.

        Args:
            tp: number of ranks that split each layer. Norms over split columns round another sum, and norms before
                split ones of latent attention get each rank's part of their gradient in fp32.
        """
        rounded = WIDE_NORM in dict(self.tp_plan).values() or ("self_attn.kv_a_layernorm", REPLICATED) in self.tp_plan
        return not self.computes_in_fp32 and (tp == 1 or not rounded)

    def whole_tp_plan(self, base: dict[str, str] | None) -> dict[str, str]:
        """How all modules split, by patterns of names below `model`.

        Args:
            base: transformers' `base_model_tp_plan`, if the config has one.
        """
        return {**(base or {}), **{f"layers.*.{name}": style for name, style in self.tp_plan}}
