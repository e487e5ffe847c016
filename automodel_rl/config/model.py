"""The trained model: its checkpoint, precision and kernels, which weights are trained, and memory savings."""

import math
from typing import Annotated, Literal

from pydantic import Field

from automodel_rl.config.base import PathText, Positive, Section

Implementation = Literal["transformers", "nemo_automodel"]
Attention = Literal["auto", "fa3", "te", "varlen", "sdpa", "eager"]
Dtype = Literal["bfloat16", "float32", "float64"]
MasterDtype = Literal["auto", "bfloat16"]
Float8 = Literal["rowwise", "tensorwise"]
Recomputed = Literal["none", "selective", "full", "offload"]
RECOMPUTE_ALL: tuple[Recomputed, ...] = ("full", "offload")
"""Kinds of activation checkpointing that recompute whole layers."""


Base = Literal["plain", "nf4", "stored"]


class LoraConfig(Section):
    """Low-rank adapters on linear layers and experts (Hu et al., arXiv:2106.09685). All other weights are frozen.

    Example:
        >>> LoraConfig(rank=8, targets=("q_proj", "v_proj")).alpha
        32.0
    """

    rank: Positive = 16
    """Rank of the adapters."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's output is multiplied by alpha / rank."""

    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, which suits large ranks (Kalajdzievski, arXiv:2312.03732)."""

    dora: bool = False
    """Also train the magnitude of each row of an adapted weight, while the adapter changes its direction (DoRA; Liu et
    al., arXiv:2402.09353). Linear layers only."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of adapter inputs in training. sft only: other algorithms compare log-probabilities, which
    dropout would make noisy."""

    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter, or suffixes of their full names, such as 0.self_attn.q_proj.
    all-linear: all but the head. experts: every expert of a mixture, which the other names do not include. vision,
    audio and projector: all linear layers of that encoder of a multimodal model, or of the projector after it;
    all-linear and partial names apply to the language model only."""

    base: Base = "plain"
    """Storage of frozen linear layers and experts of decoder layers. plain: the compute dtype. nf4: 4.5 bits per weight
    (QLoRA; Dettmers et al., arXiv:2305.14314); weights stored as nf4 with block size 64 keep their codes, others are
    quantized on loading. stored: weights that the checkpoint stores as fp8 (8.25 bits), MXFP4 (4.25) or nf4 keep that
    format, with the same results as plain. Embedding, head and routers are always plain. Resumed adapters must keep the
    values of their base: changing between nf4 and plain or stored is refused."""

    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are fully trained and saved with the adapters, such as embed_tokens and lm_head."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def has_experts(self) -> bool:
        """Whether mixture-of-experts weights are targets."""
        return any("experts" in target.split(".") for target in self.targets)


class MoEConfig(Section):
    """Load balancing for the routers of a mixture of experts.

    Example:
        >>> MoEConfig(bias_update_rate=0.001).aux_loss
        0.0
    """

    aux_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss (Fedus et al., arXiv:2101.03961, eq. 4). The loss is computed per microbatch,
    so it depends on layout and packing; 0 is off."""

    bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """Step size of the routing biases, for DeepSeek-style routers: after every optimizer step, the bias of each
    underloaded expert is raised and that of each overloaded one lowered by this amount (arXiv:2412.19437, section
    2.1.2). 0 is off."""


class MTPConfig(Section):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): trains the additional layer that generators
    use to draft tokens (speculative decoding).

    Example:
        >>> MTPConfig(weight=0.3).detached
        True
    """

    weight: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the loss on the token after the next, averaged over trained tokens."""

    detached: bool = True
    """Train only the layer: its loss has no gradient for embedding, model and head, and its gradients are clipped by
    their own norm, so that the model trains exactly as without it. false: the loss also trains them, as in DeepSeek's
    pretraining."""


class IndexerConfig(Section):
    """Trains the indexers of sparse attention, which select the keys for each query (DeepSeek-V3.2, arXiv:2512.02556,
    eq. 4).

    Example:
        >>> IndexerConfig().weight
        1.0
    """

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the KL divergence between an indexer's scores and the attention weights over the selected keys, summed
    over layers and averaged over tokens. Only indexers get its gradients, which are clipped by their own norm, so the
    weight matters only to optimizers that are sensitive to gradient scale."""


class ModelConfig(Section):
    """The trained checkpoint, its model classes and its precision.

    Example:
        >>> ModelConfig(path="Qwen/Qwen3-0.6B", dtype="float32").attention
        'auto'
    """

    path: PathText
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer), or a hub id. May also be a folder of
    adapters (adapter_config.json), such as final/ of a LoRA run; the checkpoint is then the one they name."""

    adapters: PathText | None = None
    """Folder or hub id of PEFT adapters to start from, if `path` is their base checkpoint."""

    merge_adapters: bool = False
    """Merge adapters into the weights on loading and train the weights. false: the adapters are trained."""

    pickled_weights: tuple[str, ...] = ()
    """Names of pickled weight files (pytorch_model.bin) that may be read if a checkpoint has no safetensors. Only
    tensors are unpickled; still, prefer safetensors for untrusted checkpoints."""

    trust_remote_code: bool = False
    """Run tokenizer code that comes with the checkpoint. Models always use the installed classes."""

    implementation: Implementation = "transformers"
    """Library of the model class: transformers, or nemo_automodel with its class of the same architecture."""

    dtype: Dtype = "bfloat16"
    """Compute precision."""

    master_dtype: MasterDtype = "auto"
    """Precision of the trained weights. auto: float32, or float64 if dtype is float64. bfloat16: 2 bytes per weight
    rather than 4, with stochastic rounding of each optimizer step; gradients keep their precision. Requires
    optimizer.name adamw or adamw_8bit, and no adapters."""

    fp8: Float8 | None = None
    """Compute the linear layers of decoder layers in fp8, which is faster and less accurate. rowwise: one scale per
    row, weight gradients in bfloat16. tensorwise: one scale per tensor. Experts, embedding and head stay in bfloat16.
    Needs a GPU with fp8, such as H100; null: no fp8."""

    attention: Attention = "auto"
    """Attention kernel. fa3: FlashAttention-3, for Hopper GPUs. te: TransformerEngine. varlen: torch's varlen_attn. All
    three need CUDA and bfloat16. sdpa: torch's scaled_dot_product_attention, one sequence at a time. eager: plain
    matrix products and a softmax. auto: the first of fa3, te and varlen that is available and supports the model's
    sinks or soft cap; otherwise sdpa, or eager for soft caps."""

    num_labels: Positive | None = None
    """Number of outputs of a linear head that replaces the vocabulary's, as in transformers' sequence classifiers;
    randomly initialised if the checkpoint has none. Set automatically for reward and for the critic of ppo; null: the
    vocabulary's head."""

    text_only: bool = False
    """Train only the language model of a multimodal checkpoint, as a text model on text data. Encoders are not loaded,
    and exports keep them unchanged."""

    frozen: tuple[Literal["vision", "audio", "projector", "language"], ...] = ()
    """Parts of a multimodal model that are not trained: image or audio encoder, projectors, language model."""

    lora: LoraConfig | None = None
    """Low-rank adapters to train; null: the weights themselves are trained."""

    moe: MoEConfig = MoEConfig()

    mtp: MTPConfig | None = None
    """Training of the first MTP layer, in addition to any loss; null: exports keep such layers unchanged."""

    indexer: IndexerConfig | None = None
    """Training of the sparse-attention indexers of DeepSeek-V3.2 and GLM-5, so that they follow the changing attention;
    null: they are frozen."""


class OffloadConfig(Section):
    """Trainer memory that is moved to the host while it is not needed.

    Example:
        >>> OffloadConfig(what=("moments",)).during
        'rollout'
    """

    during: Literal["rollout"] = "rollout"
    """Phase of a step in which it is on the host: rollout, while generators produce completions (grpo)."""

    what: Annotated[tuple[Literal["weights", "moments"], ...], Field(min_length=1)] = ("weights", "moments")
    """What is moved: the master weights, the optimizer moments."""


class MemoryConfig(Section):
    """Trade-offs between memory and time.

    Example:
        >>> MemoryConfig(activation_checkpointing="full").offloads_optimizer
        False
    """

    activation_checkpointing: Literal["auto"] | Recomputed = "auto"
    """Activations that each layer keeps for the backward; others are recomputed. none: keep all. selective: keep only
    results of matrix products and attention. full: keep only the layer's input and, if dense layers are compiled,
    attention's result. offload: like full, with kept activations in host memory, for rows that do not fit otherwise;
    encoders use full. auto: the fastest of none, selective and full that fits into device memory according to `plan`,
    chosen together with parallel.fsdp, offload_optimizer and batch.microbatch_tokens; none on a CPU and without a
    trainer."""

    mlp_tile: Positive | None = None
    """Number of tokens that a dense layer's MLP processes at a time, in forward and backward (tiles; Bekman et al.,
    arXiv:2506.13996), for rows that do not fit otherwise. Values above about the hidden size bring no further speed.
    null: all tokens of a microbatch."""

    offload_optimizer: Literal["auto"] | bool = "auto"
    """Keep optimizer moments in host memory and copy them to the device for each optimizer step. auto: only if a step
    does not fit otherwise."""

    offload: OffloadConfig | None = None
    """Release trainer memory to generators on the same device; null: nothing is moved."""

    reference: Literal["auto", "host", "device"] = "auto"
    """Location of the reference policy's weights (dpo, grpo). host: in host memory, swapped with the trained weights
    when needed; after rollouts with `offload`, loaded before the trained weights return. device: sharded, in the
    compute dtype. auto: on the device from the second step on if it has room; on the host if generators and trainer use
    the device's memory in turns."""

    compile: Literal["auto"] | bool = "auto"
    """Compile every layer with torch.compile, which delays the first step by half a minute, or by a few seconds in
    later runs, thanks to the cache in ~/.cache. auto: on CUDA in bfloat16, where compiled layers are supported."""

    @property
    def recomputed(self) -> Recomputed:
        """Kind of activation checkpointing; "none" while it is "auto"."""
        return "none" if self.activation_checkpointing == "auto" else self.activation_checkpointing

    @property
    def offloads_optimizer(self) -> bool:
        """Whether moments are kept in host memory; False while it is "auto"."""
        return self.offload_optimizer is True
