"""What differs between model families and cannot be read from their configs. The only place that names families."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertNames:
    """How files name the weights that transformers fuses in `...mlp.experts.gate_up_proj` and `.down_proj`.

    Attributes:
        block: the name in files of the module that is `mlp` in the model.
        gate, up, down: of one expert.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class Family:
    """One model family, by the `model_type` of its config.

    Attributes:
        experts: names of separate experts in files; None where files hold what the model holds.
        is_moe: has a mixture of experts.
        router: name of the router beside the experts.
        has_router_bias: routers add a bias, trained by load, to choose experts (DeepSeek-V3).
        has_sinks: attention has a learned sink for each head.
        rotary_by_layer_type: rotary embeddings differ between full and sliding-window layers.
        scales_embedding: the embedding module multiplies what it looks up.
        has_plain_norms: RMSNorm is weight * x / rms(x), and not Gemma's (1 + weight).
        computes_in_fp32: parts of it compute in fp32 whatever the dtype, so that float64 is not exact.
        splits_over_tp: tensor parallelism can split its layers.
        nemo_class: module and name of nemo_automodel's own class, where this package can run it.
    """

    experts: ExpertNames | None = None
    is_moe: bool = False
    router: str = "gate"
    has_router_bias: bool = False
    has_sinks: bool = False
    rotary_by_layer_type: bool = False
    scales_embedding: bool = False
    has_plain_norms: bool = True
    computes_in_fp32: bool = False
    splits_over_tp: bool = True
    nemo_class: tuple[str, str] | None = None


_NEMO = "nemo_automodel.components.models"

FAMILIES = {
    "llama": Family(nemo_class=(f"{_NEMO}.llama.model", "LlamaForCausalLM")),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(nemo_class=(f"{_NEMO}.qwen3.model", "Qwen3ForCausalLM")),
    "gemma2": Family(scales_embedding=True, has_plain_norms=False, computes_in_fp32=True),
    "gemma3_text": Family(
        scales_embedding=True, has_plain_norms=False, rotary_by_layer_type=True, computes_in_fp32=True
    ),
    "mixtral": Family(ExpertNames("block_sparse_moe", "w1", "w3", "w2"), is_moe=True, splits_over_tp=False),
    "qwen3_moe": Family(ExpertNames(), is_moe=True, splits_over_tp=False),
    "deepseek_v3": Family(
        ExpertNames(), is_moe=True, has_router_bias=True, computes_in_fp32=True, splits_over_tp=False
    ),
    "gpt_oss": Family(is_moe=True, router="router", has_sinks=True, splits_over_tp=False),
}
