"""Global batches of token sequences, loaded in shares by the data ranks and resumable between any two steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from automodel_rl.batch import PackedBatch, TokenSequence, pack
from automodel_rl.data.examples import Example, ExampleDataset, checked
from automodel_rl.data.sampler import Draw, GlobalBatches, Order
from automodel_rl.errors import InputError
from automodel_rl.parallel.host_collectives import gather_objects, interleave, tell_guests
from automodel_rl.parallel.layout import Layout


@dataclass(frozen=True)
class StepSize:
    """How much a global batch is; sizes of several add up.

    Attributes:
        num_sequences, num_tokens, num_rows: of all data ranks, empty rows left out.
        flops: of forward and backward.
    """

    num_sequences: int
    num_tokens: int
    num_rows: int
    flops: float

    def __add__(self, other: "StepSize") -> "StepSize":
        return StepSize(
            self.num_sequences + other.num_sequences,
            self.num_tokens + other.num_tokens,
            self.num_rows + other.num_rows,
            self.flops + other.flops,
        )


@dataclass(frozen=True)
class PackedStep:
    """What one data rank trains on in one step.

    Attributes:
        batches: its rows.
        size: of the global batch.
        num_truncated, num_dropped: records of the global batch that were too long for a row.
        draws: the records that the global batch is made of, in the order of its sequences.
    """

    batches: list[PackedBatch]
    size: StepSize
    num_truncated: int = 0
    num_dropped: int = 0
    draws: tuple[Draw, ...] = ()


class _NoExamples(Dataset):
    """What a guest loads: nothing, in the same steps as the others, so that all ranks' places are of one kind."""

    def __getitem__(self, draw: Draw) -> None:
        return None


class PackedLoader:
    """Yields a `PackedStep` for every global batch; one without rows for a guest of the language model.

    Each data rank tokenises its share of a global batch; then all exchange their sequences, so that rows are filled and
    work is balanced over the whole of it.

    Args:
        dataset: makes examples of records.
        examples_per_step: of a global batch.
        layout: this rank's place.
        cost: work of a sequence by its length.
        order: in which records are drawn.
        num_workers: processes that tokenise ahead.
    """

    def __init__(
        self,
        dataset: ExampleDataset,
        examples_per_step: int,
        layout: Layout,
        cost: Callable[[int], float],
        order: Order,
        num_workers: int = 0,
    ):
        self.dataset, self.layout, self.cost = dataset, layout, cost
        self.sampler = GlobalBatches(
            dataset.sources.sizes,
            dataset.sources.weights,
            examples_per_step,
            order,
            layout.data_share,
        )
        source: Dataset = _NoExamples() if layout.is_guest else dataset
        self._loader = StatefulDataLoader(source, batch_sampler=self.sampler, collate_fn=list, num_workers=num_workers)

    def __iter__(self) -> Iterator[PackedStep]:
        for share in self._loader:
            packed = None
            if not self.layout.is_guest:
                packed = self._pack(self._exchange([checked(example) for example in share]))
            without_rows = None if packed is None else replace(packed, batches=[])
            told = tell_guests(without_rows, self.layout)
            assert told is not None
            yield packed or told

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def _exchange(self, share: list[Example]) -> list[Example]:
        """The global batch, in the order in which it was drawn."""
        return interleave(gather_objects(share, self.layout.data_control))

    def _pack(self, examples: list[Example]) -> PackedStep:
        sequences = [sequence for example in examples for sequence in example.sequences]
        if not sequences:
            raise InputError(
                f"none of the {len(examples)} examples of a step has a trained token within "
                f"batch.row_tokens={self.dataset.row_tokens} and the model's context of {self.dataset.context}, so all "
                "were dropped: raise batch.row_tokens, or use shorter examples"
            )
        packed = pack_step(sequences, self.dataset.row_tokens, self.layout, self.cost, together=self.dataset.together)
        return replace(
            packed,
            num_truncated=sum(example.truncated for example in examples),
            num_dropped=sum(not example.sequences for example in examples),
            draws=tuple(example.draw for example in examples if example.sequences),
        )


def pack_step(
    sequences: Sequence[TokenSequence],
    row_tokens: int,
    layout: Layout,
    cost: Callable[[int], float],
    together: int = 1,
) -> PackedStep:
    """This data rank's rows of a global batch, of which every rank holds all sequences.

    Args:
        sequences: the global batch.
        row_tokens: capacity of a row.
        layout: this rank's place.
        cost: work of a sequence by its length.
        together: so many consecutive sequences share a row.
    """
    batches = pack(
        sequences,
        row_tokens,
        share=layout.data_share,
        min_rows=layout.parallel.pp,
        together=together,
        cost=cost,
    )
    # Rows are empty only where there are fewer groups of sequences than rows.
    num_rows = min(len(batches) * layout.parallel.num_data_ranks, len(sequences) // together)
    size = StepSize(
        len(sequences), sum(map(len, sequences)), num_rows, sum(cost(len(sequence)) for sequence in sequences)
    )
    return PackedStep(batches, size)
