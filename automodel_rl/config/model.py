"""The model that is trained: its checkpoint, how it computes, and which of its weights are trained."""

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
"""Kinds of activation checkpointing with which layers are computed again as a whole."""


Base = Literal["plain", "nf4", "stored"]


class LoraConfig(Section):
    """Low-rank adapters on linear layers and experts (Hu et al., arXiv:2106.09685); everything else is frozen.

    Example:
        >>> LoraConfig(rank=8, targets=("q_proj", "v_proj")).alpha
        32.0
    """

    rank: Positive = 16
    """Inner dimension of the adapters."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's output is multiplied by alpha / rank."""

    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, which suits large ranks (Kalajdzievski, arXiv:2312.03732)."""

    dora: bool = False
    """Train the length of each row of an adapted weight by itself, and its direction by the adapter (DoRA; Liu et al.,
    arXiv:2402.09353). Adapters of linear layers alone have it."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that are set to 0 in training. Only sft reads it: other algorithms compare
    log-probabilities, which dropout would change at random."""

    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter, or ends of their full names, such as 0.self_attn.q_proj.
    all-linear: all but the head. experts: each expert of a mixture, which the other names do not mean. vision, audio
    and projector: all linear layers of that encoder of a multimodal model, and of the projector after it; all-linear
    and names that are not whole mean the language model alone."""

    base: Base = "plain"
    """How frozen linear layers and experts of decoder layers are kept on the device. plain: in the dtype that computes.
    nf4: in 4.5 bits a weight (QLoRA; Dettmers et al., arXiv:2305.14314); weights that the checkpoint has in nf4, in
    blocks of 64, keep their codes, others are quantized when they are loaded. stored: what the checkpoint has in fp8
    (8.25 bits), MXFP4 (4.25) or nf4 stays so, and computes as if it were plain. Embedding, head and routers stay plain.
    Adapters that are gone on with bring their own: plain or stored in place of nf4, and nf4 in place of stored, are
    refused, for these bases have other values."""

    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole beside the adapters and saved with them, such as embed_tokens and
    lm_head."""

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def has_experts(self) -> bool:
        """Whether experts of a mixture are among the targets."""
        return any("experts" in target.split(".") for target in self.targets)


class MoEConfig(Section):
    """Load balancing for the routers of a mixture of experts.

    Example:
        >>> MoEConfig(bias_update_rate=0.001).aux_loss
        0.0
    """

    aux_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss (Fedus et al., arXiv:2101.03961, eq. 4). The loss is computed over each
    microbatch, so it depends on how sequences are packed. With 0, results depend neither on the layout nor on
    packing."""

    bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """Amount by which the bias of each expert changes after every optimizer step, for routers of DeepSeek's kind: up
    for experts with too little load, down for the others (arXiv:2412.19437, section 2.1.2)."""


class MTPConfig(Section):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): training of the further layer with which
    generators draft tokens (speculative decoding).

    Example:
        >>> MTPConfig(weight=0.3).detached
        True
    """

    weight: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the loss of the token after the next, summed over trained tokens and divided by the number of them."""

    detached: bool = True
    """Train the layer alone: embedding, model and head get no gradient of its loss, and its gradients are clipped by
    their own norm, so that it follows a model that is trained as without it. false: they get it, as in DeepSeek's
    pretraining."""


class IndexerConfig(Section):
    """Training of the indexers of sparse attention, which choose the keys that queries see (DeepSeek-V3.2,
    arXiv:2512.02556, eq. 4).

    Example:
        >>> IndexerConfig().weight
        1.0
    """

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the divergence of an indexer's scores from attention's weights over the keys that are seen, summed over
    layers and averaged over tokens. Indexers alone have gradients of it, which are clipped by their own norm; so the
    weight matters only to optimizers that see the size of gradients."""


class ModelConfig(Section):
    """The checkpoint that is trained, the classes that run it, and its precision.

    Example:
        >>> ModelConfig(path="Qwen/Qwen3-0.6B", dtype="float32").attention
        'auto'
    """

    path: PathText
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer), or a hub id. It may also be that of
    adapters (adapter_config.json), such as the final/ of a run with LoRA; then the checkpoint is the one they name."""

    adapters: PathText | None = None
    """Folder or hub id of adapters in PEFT's format that training begins with, if `path` is the checkpoint that they
    belong to."""

    merge_adapters: bool = False
    """Add adapters to the weights when the model is loaded, to train the weights. false: the adapters are trained."""

    pickled_weights: tuple[str, ...] = ()
    """Names of pickled weight files (pytorch_model.bin) that may be read if a checkpoint has no safetensors. Only
    tensors are unpickled. Still, prefer safetensors for checkpoints of people you do not know."""

    trust_remote_code: bool = False
    """Run the code for the tokenizer that comes with a checkpoint. Models always use the classes that are installed
    here."""

    implementation: Implementation = "transformers"
    """Library of the model class: transformers, or nemo_automodel with its class of the same architecture."""

    dtype: Dtype = "bfloat16"
    """Precision in which the model computes."""

    master_dtype: MasterDtype = "auto"
    """Precision in which trained weights are kept. auto: float32, or float64 if dtype is float64. bfloat16: 2 bytes a
    weight in place of 4; gradients stay wide, and a step rounds each new weight up or down at random, so that it is
    right on average (stochastic rounding). With optimizer.name adamw or adamw_8bit, and without adapters."""

    fp8: Float8 | None = None
    """Compute the linear layers of decoder layers in fp8, which is faster and less accurate. rowwise: scales for each
    row, the gradients of weights in bfloat16. tensorwise: scales for each tensor. Experts, embedding and head stay in
    bfloat16. It needs a GPU with fp8, such as H100; null: no fp8."""

    attention: Attention = "auto"
    """Attention kernel. fa3: FlashAttention-3, for Hopper GPUs. te: TransformerEngine. varlen: torch's varlen_attn. All
    three need CUDA and bfloat16. sdpa: torch's scaled_dot_product_attention, sequence by sequence. eager: plain matrix
    products and a softmax. auto: the first of fa3, te and varlen that can run here and computes this model's sinks or
    soft cap, if it has any; else sdpa, or eager, which alone computes soft caps."""

    num_labels: Positive | None = None
    """Number of outputs of a linear head that is trained in place of the vocabulary's, as in transformers' sequence
    classifiers. A checkpoint without such a head gets one with random weights. reward has 1, and a critic of ppo; null:
    the vocabulary's head."""

    text_only: bool = False
    """Train the language model of a multimodal checkpoint alone, as a text model, with data and rollouts of text.
    Encoders are not loaded, and exports keep them as they are."""

    frozen: tuple[Literal["vision", "audio", "projector", "language"], ...] = ()
    """Parts of a multimodal model that are not trained: the encoder of images or of audio, the projectors after them,
    the language model."""

    lora: LoraConfig | None = None
    """Low-rank adapters to train in place of all weights; null trains the weights themselves."""

    moe: MoEConfig = MoEConfig()

    mtp: MTPConfig | None = None
    """Training of the first layer for multi-token prediction, beside any loss; null: such layers are kept in exports as
    they are."""

    indexer: IndexerConfig | None = None
    """Training of the indexers of DeepSeek-V3.2 and GLM-5, so that they follow attention as it changes; null: they are
    frozen."""


class OffloadConfig(Section):
    """What leaves the device while it is not needed.

    Example:
        >>> OffloadConfig(what=("moments",)).during
        'rollout'
    """

    during: Literal["rollout"] = "rollout"
    """The part of a step in which it is on the host: rollout, while generators write completions (grpo)."""

    what: Annotated[tuple[Literal["weights", "moments"], ...], Field(min_length=1)] = ("weights", "moments")
    """What goes to the host: the model's master weights, the optimizer's moments."""


class MemoryConfig(Section):
    """Ways to save memory or time.

    Example:
        >>> MemoryConfig(activation_checkpointing="full").offloads_optimizer
        False
    """

    activation_checkpointing: Literal["auto"] | Recomputed = "auto"
    """Activations that each layer keeps for the backward; others are computed again. none: all are kept. selective:
    only results of matrix products and of attention are kept. full: only the layer's input is kept and, if dense layers
    are compiled, attention's result. offload: as full, and what is kept waits in host memory, for rows that do not fit
    otherwise; encoders as with full. auto: the fastest of the first three that fits into the device's memory by the
    plan, decided with parallel.fsdp, offload_optimizer and batch.microbatch_tokens; none on a CPU and without a
    trainer."""

    mlp_tile: Positive | None = None
    """Tokens for which a dense layer's MLP computes at a time, in the forward and again in the backward (tiles; Bekman
    et al., arXiv:2506.13996), for rows that do not fit otherwise. About the model's hidden size is as good as more.
    null: all tokens of a microbatch."""

    offload_optimizer: Literal["auto"] | bool = "auto"
    """Keep the optimizer's moments in host memory, and copy them to the device only for each optimizer step. auto: only
    if a step does not fit otherwise."""

    offload: OffloadConfig | None = None
    """Lend the trainer's memory to generators on the same device; null: it stays where it is."""

    reference: Literal["auto", "host", "device"] = "auto"
    """Place of the reference policy's weights (dpo, grpo). host: in host memory; they change places with the
    trained ones, or come to the device before them after rollouts with `offload`. device: sharded, in the compute
    dtype. auto: on the device from the second step on if it has room, and on the host if generators have the device's
    memory in turns."""

    compile: Literal["auto"] | bool = "auto"
    """Compile every layer with torch.compile, which takes half a minute before the first step, and a few seconds in
    later runs, which find its cache in ~/.cache. auto: on CUDA in bfloat16, wherever compiled layers are supported."""

    @property
    def recomputed(self) -> Recomputed:
        """What is computed again; nothing as long as it is not decided."""
        return "none" if self.activation_checkpointing == "auto" else self.activation_checkpointing

    @property
    def offloads_optimizer(self) -> bool:
        """Whether moments are kept in host memory; not as long as it is not decided."""
        return self.offload_optimizer is True
