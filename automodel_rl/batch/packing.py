"""Packing settings of a run: size and number of microbatches, and their distribution over data ranks."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from automodel_rl.batch.bins import Bin, deal_rows
from automodel_rl.config.data import CommonBatchConfig
from automodel_rl.config.parallel import ParallelConfig


@dataclass(frozen=True)
class StepSize:
    """The size of a global batch. Sizes can be added.

    Attributes:
        num_sequences, num_tokens, num_microbatches: totals over data ranks, without empty microbatches.
        flops: floating-point operations of forward and backward.
    """

    num_sequences: int
    num_tokens: int
    num_microbatches: int
    flops: float

    def __add__(self, other: "StepSize") -> "StepSize":
        return StepSize(
            self.num_sequences + other.num_sequences,
            self.num_tokens + other.num_tokens,
            self.num_microbatches + other.num_microbatches,
            self.flops + other.flops,
        )


@dataclass(frozen=True)
class Packing:
    """Packing settings of a run.

    Attributes:
        capacity: maximum tokens of a microbatch.
        num_shares: number of data ranks.
        fewest: minimum microbatches per data rank, at least the number of pipeline stages.
        multiple: the number of microbatches per data rank is a multiple of this.
        cost: FLOPs of a sequence as a function of its length.
    """

    capacity: int
    num_shares: int = 1
    fewest: int = 1
    multiple: int = 1
    cost: Callable[[int], float] = float

    @classmethod
    def of(cls, batch: CommonBatchConfig, parallel: ParallelConfig, cost: Callable[[int], float]) -> "Packing":
        """Returns the packing settings for a run's layout. `cost` is the FLOPs of a sequence as a function of its
        length."""
        fewest = max(batch.min_microbatches, parallel.pp)
        return cls(batch.capacity, parallel.num_data_ranks, fewest, batch.microbatches_multiple, cost)

    def deal(self, lengths: Sequence[int], sequences_per_example: int = 1) -> list[list[Bin]]:
        """Distributes a global batch over the data ranks, given the tokens of each sequence. `sequences_per_example`
        consecutive sequences share a microbatch. Returns the microbatches of each data rank, the same number for all,
        each as the indices of its sequences."""
        if not lengths:  # a step that trains nothing needs no empty microbatches
            return [[] for _ in range(self.num_shares)]
        deal = functools.partial(
            deal_rows,
            lengths,
            self.capacity,
            self.num_shares,
            sequences_per_example=sequences_per_example,
            cost=self.cost,
        )
        dealt = deal(min_microbatches=self.fewest)
        count = len(dealt[0])
        if count % self.multiple:
            dealt = deal(min_microbatches=math.ceil(count / self.multiple) * self.multiple)
        return dealt

    def size(self, lengths: Sequence[int], dealt: Sequence[Sequence[Bin]]) -> StepSize:
        """Returns the size of a distributed global batch."""
        num_microbatches = sum(bool(places) for share in dealt for places in share)
        return StepSize(len(lengths), sum(lengths), num_microbatches, sum(map(self.cost, lengths)))
