"""Loading of global batches. Each data rank loads its share, and loading can be resumed between any two steps."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from automodel_rl.batch import Microbatch, TokenSequence, pack
from automodel_rl.config.data import CommonBatchConfig
from automodel_rl.data.examples import Example, ExampleDataset, checked
from automodel_rl.data.sampler import BatchSampler, Draw, Order
from automodel_rl.errors import InputError
from automodel_rl.parallel.host_collectives import gather_objects, interleave, share_with_guests
from automodel_rl.parallel.layout import Layout


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
class PackedStep:
    """One data rank's part of a global batch, packed.

    Attributes:
        microbatches: this data rank's microbatches.
        size: size of the global batch.
        num_truncated, num_dropped: number of examples of the global batch that were too long and were cut or left out.
        too_long: the first of these examples, and what became of it.
        draws: the records of the global batch, in the order of its sequences.
    """

    microbatches: list[Microbatch]
    size: StepSize
    num_truncated: int = 0
    num_dropped: int = 0
    too_long: str = ""
    draws: tuple[Draw, ...] = ()


class _NoExamples(Dataset):
    """The dataset of a guest: nothing, in as many steps as other ranks, so that all ranks have the same kind of
    state."""

    def __getitem__(self, draw: Draw) -> None:
        return None


class PackedLoader:
    """Yields a `PackedStep` for every global batch. A guest, a rank without the language model, gets no microbatches.

    Each data rank tokenises its share of a global batch. Then all data ranks exchange their sequences, so that packing
    and the balance of work cover the whole global batch.

    Args:
        dataset: makes examples of records.
        examples_per_step: number of examples of a global batch.
        layout: this rank's place in the layout.
        cost: the work of a sequence as a function of its length, in FLOPs.
        order: the order in which records are drawn.
        num_workers: number of processes that tokenise ahead.
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
        self.sampler = BatchSampler(
            dataset.sources.sizes,
            dataset.sources.weights,
            examples_per_step,
            order,
            layout.data_share,
        )
        source: Dataset = _NoExamples() if layout.is_guest else dataset
        self._loader = StatefulDataLoader(
            source,
            batch_sampler=self.sampler,
            collate_fn=list,
            num_workers=num_workers,
            generator=torch.Generator(),  # it draws when it starts, and a resumed run starts it at another place
        )

    def __iter__(self) -> Iterator[PackedStep]:
        for share in self._loader:
            packed = None
            if not self.layout.is_guest:
                packed = self._pack(self._exchange([checked(example) for example in share]))
            without_microbatches = None if packed is None else replace(packed, microbatches=[])
            shared = share_with_guests(without_microbatches, self.layout)
            assert shared is not None
            yield packed or shared

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def _exchange(self, share: list[Example]) -> list[Example]:
        """All examples of the global batch, in the order of their draws."""
        return interleave(gather_objects(share, self.layout.data_control))

    def _pack(self, examples: list[Example]) -> PackedStep:
        sequences = [sequence for example in examples for sequence in example.sequences]
        if not sequences:
            raise InputError(
                f"none of the {len(examples)} examples of a step has a trained token within the "
                f"{self.dataset.longest} tokens that data.max_tokens, batch.microbatch_tokens and the model's context "
                "allow, so all were dropped: raise the least of them, or use shorter examples"
            )
        packed = pack_step(sequences, self.dataset.batch, self.layout, self.cost, together=self.dataset.together)
        return replace(
            packed,
            num_truncated=sum(example.is_truncated for example in examples),
            num_dropped=sum(not example.sequences for example in examples),
            too_long=next((example.too_long for example in examples if example.too_long), ""),
            draws=tuple(example.draw for example in examples if example.sequences),
        )


def pack_step(
    sequences: Sequence[TokenSequence],
    batch: CommonBatchConfig,
    layout: Layout,
    cost: Callable[[int], float],
    together: int = 1,
) -> PackedStep:
    """Packs a global batch, and returns this data rank's microbatches; none for a guest.

    Args:
        sequences: all sequences of the global batch, the same on every rank.
        batch: the config section that says how many tokens a microbatch holds, and how many microbatches there are.
        layout: this rank's place in the layout.
        cost: the work of a sequence as a function of its length, in FLOPs.
        together: number of consecutive sequences that share a microbatch.
    """
    fewest, multiple = max(batch.min_microbatches, layout.parallel.pp), batch.microbatches_multiple
    whole = functools.partial(pack, sequences, batch.capacity, share=layout.data_share, together=together, cost=cost)
    microbatches = whole(min_microbatches=fewest)
    if len(microbatches) % multiple:
        microbatches = whole(min_microbatches=math.ceil(len(microbatches) / multiple) * multiple)
    # Some microbatches are empty only if there are fewer groups of sequences than microbatches.
    num_microbatches = min(len(microbatches) * layout.parallel.num_data_ranks, len(sequences) // together)
    size = StepSize(
        len(sequences), sum(map(len, sequences)), num_microbatches, sum(cost(len(sequence)) for sequence in sequences)
    )
    return PackedStep([] if layout.is_guest else microbatches, size)


def sums_of_sequences(
    microbatches: Sequence[Microbatch], values_of: Callable[[Microbatch], torch.Tensor], layout: Layout
) -> torch.Tensor:
    """Sums over the counted tokens of each sequence of a global batch. A collective of the data ranks.

    Args:
        microbatches: this data rank's microbatches, as `pack_step` gives them.
        values_of: a value for every token of a microbatch, [T].
        layout: this rank's place.

    Returns:
        float64 [N], in the order in which the sequences were packed; equal on all ranks.
    """
    own: dict[int, float] = {}
    for microbatch in microbatches:
        values = torch.where(microbatch.loss_mask, values_of(microbatch), 0.0)
        own |= zip(microbatch.order, (piece.sum().item() for piece in values.split(microbatch.lengths)), strict=False)
    shares = gather_objects(own, layout.data_control)
    sums = share_with_guests({place: total for share in shares for place, total in share.items()}, layout)
    return torch.tensor([sums[place] for place in range(len(sums))], dtype=torch.float64)
