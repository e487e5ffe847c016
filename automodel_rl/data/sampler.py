"""Sampling of records for global batches: a stream of draws that is identical on every rank and in every run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automodel_rl.batch import DataShare

Draw = tuple[int, int]
"""Source index and record index."""


@dataclass(frozen=True)
class Order:
    """The order of draws and the length of the stream.

    Attributes:
        seed: seed of the order; None keeps the order of the sources.
        epochs: number of passes over the data; None for an endless stream.
    """

    seed: int | None = None
    epochs: float | None = None


class BatchSampler:
    """Yields one data rank's draws for each global batch. Draws are dealt to the data ranks in turn.

    Sources are interleaved: after any number of draws, each source has had its share to within one. Within a source,
    every record is drawn once before any is repeated.

    Args:
        sizes: number of records of each source.
        weights: relative share of each source in the draws; None is the source's size. Without any weights, an epoch
            has every record exactly once.
        batch_size: number of draws per global batch.
        order: the order of the draws.
        share: the data rank; by default there is only one.
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
        """Returns the number of global batches. The last may be smaller."""
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
