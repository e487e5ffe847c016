"""Global batches of token sequences, loaded in shares by the data ranks and resumable between any two steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from automodel_rl.batch import PackedBatch, TokenSequence, pack
from automodel_rl.config import BatchConfig, DataConfig, SourceConfig
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.mixture import Draw, GlobalBatches
from automodel_rl.data.sources import messages_of, open_source
from automodel_rl.errors import InputError
from automodel_rl.parallel.layout import Layout


@dataclass(frozen=True)
class Example:
    """A tokenised record; `sequence` is None where nothing of it can be trained on."""

    sequence: TokenSequence | None
    truncated: bool = False


@dataclass(frozen=True)
class PackedStep:
    """What one data rank trains on in one step.

    Attributes:
        batches: its rows.
        num_sequences, num_tokens, num_rows: of the global batch, empty rows left out.
        num_truncated, num_dropped: records of the global batch that were too long for a row.
        flops: of forward and backward over the global batch.
    """

    batches: list[PackedBatch]
    num_sequences: int
    num_tokens: int
    num_rows: int
    num_truncated: int
    num_dropped: int
    flops: float


class ChatDataset(Dataset):
    """Records of several sources as examples. Picklable, as worker processes need it."""

    def __init__(self, sources: Sequence[SourceConfig], chat: ChatTokenizer, row_tokens: int, overlong: str):
        self.configs, self.chat, self.row_tokens, self.overlong = sources, chat, row_tokens, overlong
        self.sources = [open_source(config) for config in sources]

    def messages(self, draw: Draw) -> tuple[list[dict[str, Any]], str]:
        """Messages of a record and where it is."""
        source, number = draw
        where = self.sources[source].where(number)
        return messages_of(self.sources[source][number], self.configs[source], where), where

    def __getitem__(self, draw: Draw) -> Example | InputError:
        """An error is returned: raised in a worker process, it would come out wrapped in that worker's traceback."""
        try:
            return self._example(draw)
        except InputError as error:
            return error

    def _example(self, draw: Draw) -> Example:
        sequence = self.chat(*self.messages(draw))
        if len(sequence) <= self.row_tokens:
            return Example(sequence)
        if self.overlong == "drop":
            return Example(None)
        cut = TokenSequence(sequence.input_ids[: self.row_tokens], sequence.loss_mask[: self.row_tokens])
        return Example(cut, truncated=True) if cut.loss_mask[1:].any() else Example(None)


class PackedLoader:
    """Yields a `PackedStep` for every global batch.

    Each data rank tokenises its share of a global batch; then all exchange their sequences, so that rows are filled and
    work is balanced over the whole of it.

    Args:
        sources: where records come from.
        chat: makes sequences of them.
        data, batch: the config's sections.
        layout: this rank's place.
        cost: work of a sequence by its length.
        seed: of the order, None for none.
        epochs: passes over the data, None for an endless stream.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        chat: ChatTokenizer,
        data: DataConfig,
        batch: BatchConfig,
        layout: Layout,
        cost: Callable[[int], float],
        *,
        seed: int | None,
        epochs: float | None,
    ):
        self.dataset = ChatDataset(sources, chat, batch.row_tokens, data.overlong)
        self.layout, self.capacity, self.cost = layout, batch.row_tokens, cost
        self.sampler = GlobalBatches(
            [len(source) for source in self.dataset.sources],
            [config.weight for config in sources],
            batch.sequences,
            seed,
            epochs=epochs,
            num_data_ranks=layout.parallel.num_data_ranks,
            data_rank=layout.data_rank,
        )
        self._loader = StatefulDataLoader(
            self.dataset, batch_sampler=self.sampler, collate_fn=list, num_workers=data.num_workers
        )

    def __iter__(self) -> Iterator[PackedStep]:
        for share in self._loader:
            for example in share:
                if isinstance(example, InputError):
                    raise example
            yield self._pack(self._exchange(share))

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def _exchange(self, share: list[Example]) -> list[Example]:
        """The global batch, in the order in which it was drawn."""
        num_ranks = self.layout.parallel.num_data_ranks
        if num_ranks == 1:
            return share
        shares: list[list[Example]] = [[] for _ in range(num_ranks)]
        dist.all_gather_object(shares, share, group=self.layout.data_control)
        return [shares[i % num_ranks][i // num_ranks] for i in range(sum(map(len, shares)))]

    def _pack(self, examples: list[Example]) -> PackedStep:
        sequences = [example.sequence for example in examples if example.sequence is not None]
        if not sequences:
            raise InputError(
                f"none of the {len(examples)} examples of a step has a trained token within "
                f"batch.row_tokens={self.capacity}, so all were dropped: raise it"
            )
        layout = self.layout
        batches = pack(
            sequences,
            self.capacity,
            num_data_ranks=layout.parallel.num_data_ranks,
            data_rank=layout.data_rank,
            cost=self.cost,
        )
        rows = torch.tensor(sum(not batch.is_empty for batch in batches))
        dist.all_reduce(rows, group=layout.data_control)
        return PackedStep(
            batches=batches,
            num_sequences=len(sequences),
            num_tokens=sum(map(len, sequences)),
            num_rows=int(rows),
            num_truncated=sum(example.truncated for example in examples),
            num_dropped=len(examples) - len(sequences),
            flops=sum(self.cost(len(sequence)) for sequence in sequences),
        )
