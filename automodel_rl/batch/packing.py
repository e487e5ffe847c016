"""How a run packs global batches: the size and the number of microbatches, and their share for each data rank."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from automodel_rl.batch.bins import Bin, deal_rows
from automodel_rl.config.data import CommonBatchConfig
from automodel_rl.config.parallel import ParallelConfig


@dataclass(frozen=True)
class StepSize:
    """The size of a global batch. Sizes of several global batches can be added.

    Attributes:
        num_sequences, num_tokens, num_microbatches: counts over all data ranks, without empty microbatches.
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
    """How a run packs.

    Attributes:
        capacity: most tokens of a microbatch.
        num_shares: number of data ranks.
        fewest: fewest microbatches of each data rank. As many as there are pipeline stages give every stage work.
        multiple: the number of microbatches of each data rank is a multiple of this.
        cost: the work of a sequence as a function of its length, in FLOPs.
    """

    capacity: int
    num_shares: int = 1
    fewest: int = 1
    multiple: int = 1
    cost: Callable[[int], float] = float

    @classmethod
    def of(cls, batch: CommonBatchConfig, parallel: ParallelConfig, cost: Callable[[int], float]) -> "Packing":
        """The packing of a run on a layout.

        Args:
            batch: the config section that says how many tokens a microbatch holds, and how many microbatches there are.
            parallel: the layout.
            cost: the work of a sequence as a function of its length, in FLOPs.
        """
        fewest = max(batch.min_microbatches, parallel.pp)
        return cls(batch.capacity, parallel.num_data_ranks, fewest, batch.microbatches_multiple, cost)

    def deal(self, lengths: Sequence[int], together: int = 1) -> list[list[Bin]]:
        """Deals a global batch to the data ranks.

        Args:
            lengths: tokens of every sequence.
            together: number of consecutive sequences that share a microbatch.

        Returns:
            The microbatches of every data rank, equally many, each as the places of its sequences.

        Raises:
            InputError: a sequence, or a group of sequences that stay together, is longer than a microbatch.
        """
        if not lengths:  # a step that trains nothing needs no empty microbatches
            return [[] for _ in range(self.num_shares)]
        deal = functools.partial(deal_rows, lengths, self.capacity, self.num_shares, together=together, cost=self.cost)
        dealt = deal(min_microbatches=self.fewest)
        count = len(dealt[0])
        if count % self.multiple:
            dealt = deal(min_microbatches=math.ceil(count / self.multiple) * self.multiple)
        return dealt

    def size(self, lengths: Sequence[int], dealt: Sequence[Sequence[Bin]]) -> StepSize:
        """The size of a global batch that was dealt."""
        num_microbatches = sum(bool(places) for share in dealt for places in share)
        return StepSize(len(lengths), sum(lengths), num_microbatches, sum(map(self.cost, lengths)))
