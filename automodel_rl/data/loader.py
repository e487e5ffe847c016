"""Loading of global batches. Loading can be resumed between any two steps."""

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
"""Key of a loader's state: the number of global batches that were loaded."""


@dataclass(frozen=True)
class LoadedStep:
    """A global batch of examples. It has no rows if none of them can be trained.

    Attributes:
        batch: the rows.
        draws: the records of the rows' examples, in their order.
        num_truncated, num_dropped: number of examples that were too long and were cut or left out.
        too_long: the first of these examples, and what became of it.
        num_refused: number of records that were refused and left out.
        refused: why the first of these was.
    """

    batch: Batch
    draws: tuple[Draw, ...]
    num_truncated: int = 0
    num_dropped: int = 0
    too_long: str = ""
    num_refused: int = 0
    refused: str = ""


class ExampleLoader:
    """Yields a `LoadedStep` for every global batch.

    Args:
        dataset: makes examples of records.
        examples_per_step: number of examples of a global batch.
        order: the order in which records are drawn.
        num_workers: number of processes that tokenise ahead.
    """

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
            generator=torch.Generator(),  # it draws when it starts, and a resumed run starts it at another place
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
            Batch(sequences, together=self.dataset.together),
            tuple(example.draw for example in examples if example.sequences),
            num_truncated=sum(example.is_truncated for example in examples),
            num_dropped=sum(bool(example.too_long and not example.sequences) for example in examples),
            too_long=next((example.too_long for example in examples if example.too_long), ""),
            num_refused=sum(bool(example.refused) for example in examples),
            refused=next((example.refused for example in examples if example.refused), ""),
        )


def _outlive_signals(number: int) -> None:
    """Lets a process that tokenises ignore signals to stop, which go to all processes of a job: rank 0 decides, and the
    process ends with it."""
    for stop in stop_signals():
        signal.signal(stop, signal.SIG_IGN)
