"""The parallel layout of a model over ranks."""

from typing import Literal

from automodel_rl.config.base import Positive, Section

Fsdp = Literal["keep", "reduce", "reshard"]

Schedule = Literal[
    "1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class ParallelConfig(Section):
    """Sizes of the mesh dimensions. The world size is pp x dp_shard x dp_replicate x tp x cp.

    Example:
        >>> parallel = ParallelConfig(pp=2, tp=2, dp_shard=4)
        >>> str(parallel), parallel.world_size
        ('pp 2 x dp_shard 4 x tp 2', 16)
    """

    pp: Positive = 1
    """Pipeline parallel: number of ranks that split the layers."""

    schedule: Schedule = "1F1B"
    """Pipeline schedule, by torch's name."""

    virtual_stages: Positive = 1
    """Number of stages per rank. Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble and DualPipeV need
    more than one."""

    layers_per_stage: tuple[Positive, ...] | None = None
    """Number of layers of each stage, first stage first. By default as even as possible; if not equal, the last stages
    have one layer less, because the last one also holds the head."""

    dp_shard: Positive = 1
    """Data parallel: number of data ranks that shard weights, gradients and optimizer state (FSDP2)."""

    fsdp: Literal["auto"] | Fsdp = "auto"
    """Treatment of weights and gradients within a step. keep: gather weights once per step and reduce gradients at its
    end, which is fastest. reduce: gather weights once per step, and reduce gradients to shards after each microbatch.
    reshard: like reduce, but gather each layer for its computation and release it afterwards, which takes the least
    memory. Encoders always use keep. auto: the fastest that fits into device memory according to `plan`; keep for a
    `ModelHandle` without a trainer."""

    dp_replicate: Positive = 1
    """Data parallel: number of copies of the sharded group (HSDP)."""

    tp: Positive = 1
    """Tensor parallel: number of ranks that split attention heads, MLP columns and the vocabulary."""

    sequence_parallel: bool = False
    """Split the tokens over the tp ranks between the tensor-parallel blocks, which saves activation memory."""

    cp: Positive = 1
    """Context parallel: number of ranks that split every sequence of a microbatch. They also shard the weights."""

    cp_exchange: Literal["all_gather", "all_to_all"] = "all_gather"
    """What context-parallel ranks exchange for attention. all_gather: keys and values of all tokens, for any number of
    heads. all_to_all (Ulysses; Jacobs et al., arXiv:2309.14509): each rank gets all tokens of its share of the heads,
    which saves memory, the more the larger cp is; cp x tp must divide heads and KV heads."""

    ep: Positive = 1
    """Expert parallel: number of ranks that split the experts of a mixture. They are among the dp_shard x cp x tp
    ranks, so ep adds none."""

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh dimensions larger than 1, for messages."""
        return {name: size for name, size in self.model_dump().items() if isinstance(size, int) and size > 1}

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items()) or "one rank"

    @property
    def gathers_keys(self) -> bool:
        """Whether context-parallel ranks gather keys and values, so that a rank has more keys than queries."""
        return self.cp > 1 and self.cp_exchange == "all_gather"

    @property
    def reshards(self) -> bool:
        """Whether weights are gathered layer by layer."""
        return self.fsdp == "reshard"

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced to shards after each microbatch."""
        return self.fsdp in ("reduce", "reshard")

    @property
    def num_data_ranks(self) -> int:
        """Number of data-parallel ranks, each with different data."""
        return self.dp_shard * self.dp_replicate

    @property
    def fsdp_size(self) -> int:
        """Number of ranks that shard one copy of a stage's weights."""
        return self.dp_shard * self.cp

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that hold one copy of a stage's experts."""
        return self.fsdp_size * self.tp

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        return self.pp * self.virtual_stages

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.pp * self.num_data_ranks * self.tp * self.cp
