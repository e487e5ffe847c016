"""Facts about a family of text models, or of the language models of a multimodal family."""

from dataclasses import dataclass
from typing import Any

from automodel_rl.parallel.tensor_parallel import REPLICATED, WIDE_NORM

TPPlan = tuple[tuple[str, str], ...]
"""Pairs of a name and its tensor-parallel style."""


@dataclass(frozen=True)
class Family:
    """A model family, by the `model_type` of its config. File names of its tensors are in file_names.py.

    Attributes:
        is_moe: whether it has a mixture of experts.
        block: name of a layer's mixture; empty if router and experts belong to the layer itself.
        router: name of the router next to the experts.
        router_bias: name, relative to the mixture, of the routing bias that is trained from the load (DeepSeek-V3,
            arXiv:2412.19437); empty if there is none.
        router_gives_logits: whether the router's scores are those before the softmax.
        transposes_experts: whether stacked expert weights are [experts, inputs, outputs].
        has_square_output: whether the input width of attention's output projection is the hidden size, regardless of
            heads.
        has_sinks: whether attention has a learned sink per head.
        shares_kv: whether layers store keys and values for later layers in a dict passed to all of them.
        index_rotary: dims of an indexer (model/sparse_attention.py) that rotary embeddings rotate together: "halves" or
            "pairs"; empty without indexers.
        carried_argument: argument through which a layer receives the previous layer's additional output; empty if
            layers return only hidden states.
        mtp_files: location of the MTP layer (model/mtp.py) in files: "layer" after the last layer, "mtp" in a separate
            module, "mimo" in a module inside the model; empty if it is not supported.
        mtp_kinds: kinds of the MTP layer's attention and MLP, for models whose layers differ.
        rotary_by_layer_type: whether rotary embeddings differ between full and sliding-window layers.
        rotary_axes: number of axes of rotary positions; 3 for language models with image support (M-RoPE).
        token_mixer: name of the token mixer of layers without attention (model/token_mixers/known.py); empty if all
            have attention.
        passes_all_arguments: whether layers pass all arguments to attention. If not, they get the forward of Llama's
            layers, whose modules they have.
        renamed_modules: modules of the body with unusual names, and the usual names that they are given.
        fp32_modules: names, relative to a layer, of modules whose weights stay in fp32.
        scales_embedding: whether the embedding module scales its output.
        embedding_factor: config key of the factor on embeddings; empty if there is none.
        root_factor: config key that enables scaling of embeddings by the square root of their width; empty if there is
            none.
        logit_factor, logit_divisor: config keys of a factor on logits, and of a divisor; empty if there is none.
        has_plain_norms: whether RMSNorm is weight * x / rms(x), rather than Gemma's (1 + weight).
        computes_in_fp32: whether parts always compute in fp32, so that float64 is not exact.
        tp_plan: tensor-parallel styles by names relative to a layer, where transformers' own plan lacks them or is not
            supported.
        nemo_class: module and name of nemo_automodel's class, if supported.
    """

    is_moe: bool = False
    block: str = "mlp"
    router: str = "gate"
    router_bias: str = ""
    router_gives_logits: bool = True
    transposes_experts: bool = False
    has_square_output: bool = False
    has_sinks: bool = False
    shares_kv: bool = False
    index_rotary: str = ""
    carried_argument: str = ""
    mtp_files: str = ""
    mtp_kinds: tuple[str, str] = ("full_attention", "sparse")
    rotary_by_layer_type: bool = False
    rotary_axes: int = 1
    token_mixer: str = ""
    passes_all_arguments: bool = True
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
        """Returns the factor on embeddings outside the embedding module. `values` is the config as a dict."""
        root = values["hidden_size"] ** 0.5 if values.get(self.root_factor) else 1.0
        return root * values.get(self.embedding_factor, 1.0)

    def is_exact(self, tp: int) -> bool:
        """Whether a float64 model computes entirely in float64, rather than rounding to fp32 like transformers. With tp
        above 1, norms over split columns round a different sum, and norms before split layers of latent attention get
        each rank's part of their gradient in fp32."""
        rounded = WIDE_NORM in dict(self.tp_plan).values() or ("self_attn.kv_a_layernorm", REPLICATED) in self.tp_plan
        return not self.computes_in_fp32 and (tp == 1 or not rounded)

    def whole_tp_plan(self, base: dict[str, str] | None) -> dict[str, str]:
        """Returns the tensor-parallel styles of all modules by name patterns below `model`. `base` is transformers'
        `base_model_tp_plan`."""
        return {**(base or {}), **{f"layers.*.{name}": style for name, style in self.tp_plan}}
