"""Which model is trained, how it computes, and what of it is trained."""

from typing import Annotated, Literal

from pydantic import Field

from automodel_rl.config.base import PathText, Positive, Section

Implementation = Literal["transformers", "nemo_automodel"]
Attention = Literal["auto", "varlen", "te", "sdpa", "eager"]
Dtype = Literal["bfloat16", "float32", "float64"]


class LoraConfig(Section):
    """Low-rank adapters on linear layers (Hu et al., arXiv:2106.09685); everything else is frozen.

    Example:
        >>> LoraConfig(rank=8, targets=("q_proj", "v_proj")).alpha
        32.0
    """

    rank: Positive = 16
    """Inner dimension of the adapters."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's output is multiplied by alpha / rank."""

    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get one."""


class MoEConfig(Section):
    """Training of the routers of a mixture of experts.

    Example:
        >>> MoEConfig(bias_update_rate=0.001).aux_loss
        0.0
    """

    aux_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss (Fedus et al., arXiv:2101.03961, eq. 4), taken over each microbatch of each
    rank. It depends on how sequences are packed, so 0 keeps layouts and packing exact."""

    bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """Step by which DeepSeek's routers raise the bias of experts with too little load and lower the others' after every
    update (arXiv:2412.19437, section 2.1.2)."""


class ModelConfig(Section):
    """Which checkpoint is trained, by whose classes, and in which precision.

    Example:
        >>> ModelConfig(path="Qwen/Qwen3-0.6B", dtype="float32").attention
        'auto'
    """

    path: PathText
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer), or a hub id."""

    pickled_weights: tuple[str, ...] = ()
    """Names of pickled weight files (pytorch_model.bin) that may be read where a checkpoint has no safetensors. Nothing
    but tensors is unpickled, but prefer safetensors from people you do not know."""

    trust_remote_code: bool = False
    """Run the code that a checkpoint brings for its tokenizer. Models are always of the classes installed here."""

    implementation: Implementation = "transformers"
    """Whose model class runs: transformers' own, or nemo_automodel's of the same architecture."""

    dtype: Dtype = "bfloat16"
    """What the model computes in. Master weights are float32 (float64 for float64)."""

    attention: Attention = "auto"
    """Attention over microbatches: torch's varlen_attn or TransformerEngine (both CUDA and bfloat16), SDPA over each
    sequence, or the mathematics written out. auto: eager for models with sinks or a soft cap, else varlen on CUDA in
    bfloat16, else sdpa."""

    frozen: tuple[Literal["vision", "projector", "language"], ...] = ()
    """Parts of a vision-language model that are not trained: the encoder of images, the projector after it, the
    language model."""

    lora: LoraConfig | None = None
    """Train low-rank adapters in place of all weights."""

    moe: MoEConfig = MoEConfig()


class MemoryConfig(Section):
    """What is given up for memory or speed.

    Example:
        >>> MemoryConfig(activation_checkpointing="full").offload_optimizer
        False
    """

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward recomputes of every layer: nothing; all but matrix products and attention; everything."""

    offload_optimizer: bool = False
    """Keep the optimizer's moments in host memory and bring them to the device for each update only."""

    compile: bool = False
    """Compile every layer with torch.compile around its attention; takes a minute at the start."""
