"""How the model is laid out over ranks."""

from typing import Literal

from automodel_rl.config.base import Positive, Section

Schedule = Literal[
    "1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class ParallelConfig(Section):
    """Sizes of the mesh axes. The world size is their product, without ep.

    Example:
        >>> parallel = ParallelConfig(pp=2, tp=2, dp_shard=4)
        >>> str(parallel), parallel.world_size
        ('pp 2 x dp_shard 4 x tp 2', 16)
    """

    pp: Positive = 1
    """Pipeline parallel: stages the layers are split into."""

    schedule: Schedule = "1F1B"
    """Pipeline schedule."""

    virtual_stages: Positive = 1
    """Stages on each rank; more than one with the schedules that ask for it."""

    layers_per_stage: tuple[Positive, ...] | None = None
    """Layers of each stage, first stage first; by default as even as possible, the last, with the head, shortest."""

    dp_shard: Positive = 1
    """Data parallel with sharded weights, gradients and optimizer state (FSDP2)."""

    dp_replicate: Positive = 1
    """Copies of the sharded group (HSDP)."""

    tp: Positive = 1
    """Tensor parallel: attention heads, MLP columns and vocabulary of every layer split over ranks."""

    sequence_parallel: bool = False
    """With tp: between the split blocks every rank keeps its share of the tokens, which saves activation memory."""

    cp: Positive = 1
    """Context parallel: every sequence of a microbatch split over ranks. They also shard the weights."""

    ep: Positive = 1
    """Expert parallel: experts of a mixture split over the dp_shard x cp ranks. It adds no ranks."""

    @property
    def sizes(self) -> dict[str, int]:
        """The axes and counts that are above one, for messages."""
        return {name: size for name, size in self.model_dump().items() if isinstance(size, int) and size > 1}

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items()) or "one rank"

    @property
    def num_data_ranks(self) -> int:
        """Ranks with data of their own."""
        return self.dp_shard * self.dp_replicate

    @property
    def fsdp_size(self) -> int:
        """Ranks that shard one copy of a stage's weights."""
        return self.dp_shard * self.cp

    @property
    def num_stages(self) -> int:
        """Pipeline stages of all ranks."""
        return self.pp * self.virtual_stages

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.pp * self.num_data_ranks * self.tp * self.cp
