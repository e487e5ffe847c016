"""Loading of global batches, resumable between any two steps."""

import itertools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from automodel_rl.batch import Batch
from automodel_rl.data.examples import Example, ExampleDataset, checked
from automodel_rl.data.sampler import BatchSampler, Draw, Order
from automodel_rl.launch.stop_signal import stop_signals

PLACE = "num_steps"
"""Key of the loader's state: the number of global batches loaded so far."""


@dataclass(frozen=True)
class LoadedStep:
    """A global batch of examples, empty if none of them can be trained.

    Attributes:
        batch: the token sequences.
        draws: records of the batch's examples, in order.
        num_truncated, num_dropped: number of examples that were too long and were truncated or dropped.
        too_long: message about the first of these.
        num_refused: number of records that were rejected and dropped.
        refused: reason for the first of these.
    """

    batch: Batch
    draws: tuple[Draw, ...]
    num_truncated: int = 0
    num_dropped: int = 0
    too_long: str = ""
    num_refused: int = 0
    refused: str = ""


class ExampleLoader:
    """Yields a `LoadedStep` for every global batch of `examples_per_step` examples. `num_workers` processes tokenise
    ahead."""

    def __init__(self, dataset: ExampleDataset, examples_per_step: int, order: Order, num_workers: int = 0):
        self.dataset, self.num_workers = dataset, num_workers
        self.sampler = BatchSampler(dataset.sources.sizes, dataset.sources.weights, examples_per_step, order)
        self._num_steps = 0

    def __iter__(self) -> Iterator[LoadedStep]:
        loader = DataLoader(
            self.dataset,
            batch_sampler=itertools.islice(self.sampler, self._num_steps, None),
            collate_fn=list,
            num_workers=self.num_workers,
            worker_init_fn=_outlive_signals,
            generator=torch.Generator(),  # DataLoader draws a seed on start; drawn globally, resumed runs would diverge
        )
        for examples in loader:
            self._num_steps += 1
            yield self._step([checked(example) for example in examples])

    def state_dict(self) -> dict[str, Any]:
        return {PLACE: self._num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_steps = state[PLACE]

    def _step(self, examples: Sequence[Example]) -> LoadedStep:
        sequences = [sequence for example in examples for sequence in example.sequences]
        return LoadedStep(
            Batch(sequences, sequences_per_example=self.dataset.sequences_per_example),
            tuple(example.draw for example in examples if example.sequences),
            num_truncated=sum(example.is_truncated for example in examples),
            num_dropped=sum(bool(example.too_long and not example.sequences) for example in examples),
            too_long=next((example.too_long for example in examples if example.too_long), ""),
            num_refused=sum(bool(example.refused) for example in examples),
            refused=next((example.refused for example in examples if example.refused), ""),
        )


def _outlive_signals(number: int) -> None:
    """Makes a worker process ignore stop signals, which are sent to all processes of a job. Rank 0 handles them, and
    its workers end with it."""
    for stop in stop_signals():
        signal.signal(stop, signal.SIG_IGN)
