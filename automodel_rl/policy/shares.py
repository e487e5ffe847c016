"""A data rank's share of a batch, as sent from the program to the rank."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automodel_rl.batch import (
    Batch,
    Media,
    Microbatch,
    Routes,
    RoutesRef,
    TokenSequence,
    empty_microbatch,
    join_routes,
    pack_microbatch,
)


@dataclass(frozen=True)
class Share:
    """The rows of each microbatch of a data rank.

    It is pickled as a few flat arrays: pickling one tensor per row would take longer than sending them.

    Attributes:
        microbatches: row numbers of each microbatch; empty microbatches have none.
        rows: the rows by number.
        like: a row of the batch, for the names and dtypes of values of empty microbatches; None if the batch has
            none.
        routes: locations of the rows' routes, piece by piece; empty if there are none.
    """

    microbatches: list[list[int]]
    rows: dict[int, TokenSequence]
    like: TokenSequence | None
    routes: dict[int, Sequence[RoutesRef]]

    @classmethod
    def of(cls, batch: Batch, microbatches: list[list[int]]) -> "Share":
        """Builds the share of a data rank with these row numbers in its microbatches."""
        rows = {row: batch.sequences[row] for places in microbatches for row in places}
        routes = {row: batch.routes[row] for row in rows} if batch.routes else {}
        return cls(microbatches, rows, batch.sequences[0] if len(batch) else None, routes)

    def pack(self, routes: Mapping[RoutesRef, Routes] | None = None) -> list[Microbatch]:
        """Packs the microbatches. `routes` are the pieces for a mixture that follows routes; None if its routers
        choose."""
        like = None if self.like is None else pack_microbatch([self.like])
        packed = [
            pack_microbatch([self.rows[row] for row in places], order=places) if places else empty_microbatch(like)
            for places in self.microbatches
        ]
        if routes is None:
            return packed
        return [
            dataclasses.replace(
                microbatch, routes=join_routes([routes[at] for row in microbatch.order for at in self.routes[row]])
            )
            for microbatch in packed
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        likes = [] if self.like is None else [self.like]
        return _unflattened, (self.microbatches, [*self.rows], _flattened([*self.rows.values(), *likes]), self.routes)


@dataclass(frozen=True)
class _Flat:
    """Sequences concatenated into flat arrays, with one entry per token."""

    lengths: list[int]
    ids: np.ndarray
    mask: np.ndarray
    values: dict[str, tuple[np.ndarray, torch.dtype]]
    routes: list[Routes | None]
    media: list[tuple[Media, ...]]


def _flattened(sequences: Sequence[TokenSequence]) -> _Flat:
    names = sequences[0].values if sequences else {}
    return _Flat(
        [*map(len, sequences)],
        _joined([sequence.input_ids for sequence in sequences]),
        _joined([sequence.loss_mask for sequence in sequences]),
        {name: _bytes_of([sequence.values[name] for sequence in sequences]) for name in names},
        [sequence.routes for sequence in sequences],
        [sequence.media for sequence in sequences],
    )


def _bytes_of(tensors: Sequence[Tensor]) -> tuple[np.ndarray, torch.dtype]:
    """Concatenates tensors of any dtype and device as bytes: NumPy has no bfloat16."""
    joined = torch.cat([tensor.detach().cpu() for tensor in tensors])
    return joined.view(torch.uint8).numpy(), joined.dtype


def _joined(tensors: Sequence[Tensor]) -> np.ndarray:
    return torch.cat([*tensors]).numpy() if tensors else np.empty(0)


def _unflattened(
    microbatches: list[list[int]], numbers: list[int], flat: _Flat, routes: dict[int, Sequence[RoutesRef]]
) -> Share:
    def split(array: np.ndarray) -> Sequence[Tensor]:
        return torch.from_numpy(array).split(flat.lengths)

    values = {
        name: torch.from_numpy(array).view(dtype).split(flat.lengths) for name, (array, dtype) in flat.values.items()
    }
    of_rows = zip(split(flat.ids), split(flat.mask), flat.routes, flat.media, strict=True) if flat.lengths else ()
    sequences = [
        TokenSequence(ids, mask, {name: of[place] for name, of in values.items()}, own_routes, media)
        for place, (ids, mask, own_routes, media) in enumerate(of_rows)
    ]
    like = sequences.pop() if sequences else None
    return Share(microbatches, dict(zip(numbers, sequences, strict=True)), like, routes)


@dataclass(frozen=True)
class RowValues:
    """Per-token results of a data rank's rows.

    Attributes:
        rows: the row numbers.
        values: a result per token of these rows, [sum of n, ...].
        lengths: token count of each row.
    """

    rows: list[int]
    values: np.ndarray
    lengths: list[int]

    @classmethod
    def of(cls, rows: Sequence[int], pieces: Sequence[Tensor]) -> "RowValues":
        return cls([*rows], _joined(pieces), [*map(len, pieces)])

    def by_row(self) -> dict[int, Tensor]:
        """Results of each row, [n, ...]."""
        if not self.rows:
            return {}
        return dict(zip(self.rows, torch.from_numpy(self.values).split(self.lengths), strict=True))
