"""Which records make up each global batch: a fixed stream of draws, the same on every rank and in every run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automodel_rl.batch import DataShare

Draw = tuple[int, int]
"""Source, and record in it."""


@dataclass(frozen=True)
class Order:
    """In which order records are drawn, and for how long.

    Attributes:
        seed: of the order; None keeps that of the sources.
        epochs: passes over the data after which the stream ends; None never ends it.
    """

    seed: int | None = None
    epochs: float | None = None


class BatchSampler:
    """For every step the draws of one data rank: every `num_data_ranks`-th of the global batch.

    Sources are interleaved so that after any number of draws each has its share, to within one. Inside a source, every
    record comes once before any comes again.

    Args:
        sizes: records of every source.
        weights: share of every source; None stands for its size, so that without weights an epoch is exact.
        batch_size: draws of a global batch.
        order: in which records are drawn.
        share: of which data rank the draws come out; by default there is one.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float | None],
        batch_size: int,
        order: Order,
        share: DataShare | None = None,
    ):
        self.sizes, self.batch_size, self.seed = sizes, batch_size, order.seed
        self.weights = [float(size) if weight is None else weight for size, weight in zip(sizes, weights, strict=True)]
        self.num_draws = None if order.epochs is None else round(order.epochs * sum(sizes))
        self.share = share or DataShare()

    def __len__(self) -> int:
        """Batches of the stream, the last one perhaps smaller."""
        if self.num_draws is None:
            raise TypeError("a stream without a number of epochs has no length")
        return math.ceil(self.num_draws / self.batch_size)

    def __iter__(self) -> Iterator[list[Draw]]:
        draws = self._draws()
        left = self.num_draws
        while left is None or left > 0:
            size = self.batch_size if left is None else min(left, self.batch_size)
            batch = [next(draws) for _ in range(size)]
            yield batch[self.share.places]
            left = None if left is None else left - size

    def _draws(self) -> Iterator[Draw]:
        streams = [self._records(source) for source in range(len(self.sizes))]
        taken = np.zeros(len(streams))
        share = np.array(self.weights) / sum(self.weights)
        total = 0
        while True:
            total += 1
            source = int((share * total - taken).argmax()) if len(streams) > 1 else 0
            taken[source] += 1
            yield source, next(streams[source])

    def _records(self, source: int) -> Iterator[int]:
        epoch = 0
        while True:
            if self.seed is None:
                yield from range(self.sizes[source])
            else:
                generator = np.random.default_rng([self.seed, source, epoch])
                yield from generator.permutation(self.sizes[source]).tolist()
            epoch += 1
