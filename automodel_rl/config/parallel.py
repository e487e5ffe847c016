"""The layout: how the model is distributed over ranks."""

from typing import Literal

from automodel_rl.config.base import Positive, Section

Fsdp = Literal["keep", "reduce", "reshard"]

Schedule = Literal[
    "1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class ParallelConfig(Section):
    """Sizes of the axes of the mesh. The world size is pp x dp_shard x dp_replicate x tp x cp.

    Example:
        >>> parallel = ParallelConfig(pp=2, tp=2, dp_shard=4)
        >>> str(parallel), parallel.world_size
        ('pp 2 x dp_shard 4 x tp 2', 16)
    """

    pp: Positive = 1
    """Pipeline parallel: number of ranks that the layers are split over."""

    schedule: Schedule = "1F1B"
    """Pipeline schedule, by torch's name."""

    virtual_stages: Positive = 1
    """Number of stages on each rank. The schedules Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble and
    DualPipeV need more than one."""

    layers_per_stage: tuple[Positive, ...] | None = None
    """Number of layers of each stage, first stage first. By default they are as even as possible. If they cannot be
    equal, the last stages have one layer less, because the last one also has the head."""

    dp_shard: Positive = 1
    """Data parallel: number of data ranks that share weights, gradients and optimizer state (FSDP2)."""

    fsdp: Literal["auto"] | Fsdp = "auto"
    """Weights and gradients within a step. keep: weights are gathered once a step, and gradients summed whole until its
    end, which is fastest. reduce: weights are gathered once a step, and gradients reduced over ranks after each
    microbatch and summed in shards. reshard: gradients likewise, and each layer is gathered when it computes and let go
    of after it, which takes the least memory. Encoders always keep theirs. auto: the fastest with which a step fits
    into the device's memory by the plan; a `ModelHandle` without a trainer keeps."""

    dp_replicate: Positive = 1
    """Data parallel: number of copies of the sharded group (HSDP)."""

    tp: Positive = 1
    """Tensor parallel: number of ranks that attention heads, MLP columns and the vocabulary are split over."""

    sequence_parallel: bool = False
    """Keep only a share of the tokens on each of the tp ranks between the split blocks. This saves activation
    memory."""

    cp: Positive = 1
    """Context parallel: number of ranks that every sequence of a microbatch is split over. They also shard the
    weights."""

    cp_exchange: Literal["all_gather", "all_to_all"] = "all_gather"
    """What context-parallel ranks exchange for attention. all_gather: keys and values of all tokens, for any number of
    heads. all_to_all (Ulysses; Jacobs et al., arXiv:2309.14509): a rank gets all tokens of its share of the heads. That
    takes less memory, the more so the larger cp is, and cp x tp divides heads and KV heads."""

    ep: Positive = 1
    """Expert parallel: number of ranks that the experts of a mixture are split over. They are among the dp_shard x cp
    x tp ranks, so ep adds none."""

    @property
    def sizes(self) -> dict[str, int]:
        """Axes and counts that are above 1, for messages."""
        return {name: size for name, size in self.model_dump().items() if isinstance(size, int) and size > 1}

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items()) or "one rank"

    @property
    def gathers_keys(self) -> bool:
        """Whether context-parallel ranks gather keys and values, and have fewer queries than keys."""
        return self.cp > 1 and self.cp_exchange == "all_gather"

    @property
    def reshards(self) -> bool:
        """Whether weights are gathered layer by layer."""
        return self.fsdp == "reshard"

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced over ranks after each microbatch, and summed in shards."""
        return self.fsdp in ("reduce", "reshard")

    @property
    def num_data_ranks(self) -> int:
        """Number of data ranks, which have data of their own."""
        return self.dp_shard * self.dp_replicate

    @property
    def fsdp_size(self) -> int:
        """Number of ranks that shard one copy of a stage's weights."""
        return self.dp_shard * self.cp

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that share one copy of a stage's experts."""
        return self.fsdp_size * self.tp

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, over all ranks."""
        return self.pp * self.virtual_stages

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.pp * self.num_data_ranks * self.tp * self.cp
