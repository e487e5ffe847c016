"""What ranks agree on: rows that one step can run, before they compute, and that all have failed if one has.

A rank that found out alone would leave the others waiting for it in a collective.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from automodel_rl.batch import IGNORED_TARGET, PackedBatch
from automodel_rl.errors import InputError, MicrobatchError, PeerError
from automodel_rl.launch.flight import flight
from automodel_rl.losses import Denominator, count
from automodel_rl.parallel.host_collectives import any_rank, gather_objects
from automodel_rl.parallel.layout import Layout

GUEST = -1
"""In place of its data rank, what a rank without the language model says."""

UNITS, ROUNDING = 10_000, 10
"""Values of rows are compared in units of so small a part of them, and may differ by so many."""


@dataclass(frozen=True)
class GlobalRows:
    """The rows of all data ranks together.

    Attributes:
        num_rows: of each data rank, empty ones included.
        counts: by what losses divide their sums.

    Example:
        >>> import torch
        >>> handle = ModelHandle.from_pretrained(checkpoint)
        >>> handle.global_rows(pack([TokenSequence(torch.tensor([5, 6]), torch.tensor([False, True]))], capacity=8))
        GlobalRows(num_rows=1, counts={'tokens': 1, 'sequences': 1, 'pairs': 0, 'positions': 2})
    """

    num_rows: int
    counts: dict[Denominator, int]


def agree_on_rows(batches: Sequence[PackedBatch], vocab_size: int, layout: Layout) -> GlobalRows:
    """Looks whether all ranks have rows that fit the model and each other, and adds up what they hold. A collective.

    Args:
        batches: this data rank's rows.
        vocab_size: of the model.
        layout: this rank's place.

    Raises:
        InputError: on every rank, if rows are not on the host or a token id is outside the vocabulary on any, or data
            ranks have other numbers of rows, or the ranks of one data rank have other rows.
    """
    problem = _problem(batches, vocab_size)
    counts = count(batches)
    own = torch.tensor(
        [
            GUEST if layout.is_guest else layout.data_rank,
            int(layout.is_first_of_data_rank),
            problem != "",
            len(batches),
            _fingerprint(batches),
            _mixture(batches),
            *counts.values(),
        ]
    )
    everyone = [torch.empty_like(own) for _ in range(layout.world_control.size())]
    dist.all_gather(everyone, own, group=layout.world_control)
    ranks = torch.stack(everyone)
    if ranks[:, 2].any():
        told = gather_objects(problem, layout.world_control)
        raise InputError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text))
    members = ranks[ranks[:, 0] != GUEST]
    data_ranks = members[members[:, 1] == 1]
    _refuse_other_rows(members, data_ranks)
    totals = data_ranks[:, 6:].sum(0).tolist()
    return GlobalRows(num_rows=int(data_ranks[0, 3]), counts=dict(zip(counts, totals, strict=True)))


def _refuse_other_rows(members: torch.Tensor, data_ranks: torch.Tensor) -> None:
    """Args: what the ranks with the language model said, and of them the first of each data rank."""
    for data_rank, *_, num_rows, fingerprint, mixture in data_ranks[:, :6].tolist():
        others = members[members[:, 0] == data_rank]
        same = (others[:, 3] == num_rows) & (others[:, 4] == fingerprint)
        if not same.all() or ((others[:, 5] - mixture).abs() > ROUNDING).any():
            what = "values in their rows" if same.all() else "rows"
            raise InputError(
                f"the ranks of data rank {data_rank} have different {what}: all pipeline, tensor and context-parallel "
                "ranks of a data rank need the same ones, in the same order"
            )
    if (data_ranks[:, 3] != data_ranks[0, 3]).any():
        ordered = data_ranks[data_ranks[:, 0].argsort(), 3].tolist()
        raise InputError(
            f"data ranks have {ordered} rows: give every one equally many, as pack(..., num_data_ranks={len(ordered)}, "
            "data_rank=R) does"
        )


def raise_everywhere(failure: MicrobatchError | None, layout: Layout) -> None:
    """Raises what has failed on this rank or, where nothing has, what has failed on another. A collective.

    Args:
        failure: of this rank, which has gone on to the end of its pass nevertheless.
    """
    if not any_rank([failure is not None], layout)[0]:
        return
    told = gather_objects(None if failure is None else (failure.place, str(failure)), layout.world_control)
    if failure is not None:
        with flight.phase(failure.place):
            raise failure
    rank, (place, text) = next((rank, said) for rank, said in enumerate(told) if said is not None)
    raise PeerError(rank, place, text)


def _problem(batches: Sequence[PackedBatch], vocab_size: int) -> str:
    """What is wrong with this rank's rows; empty if nothing is."""
    for number, batch in enumerate(batches):
        if batch.input_ids.device.type != "cpu":
            return f"row {number} is on {batch.input_ids.device}: leave rows on the host, the step moves them"
        for name, ids in (("input_ids", batch.input_ids), ("targets", batch.targets)):
            outside = (ids < 0) | (ids >= vocab_size)
            if name == "targets":
                outside &= ids != IGNORED_TARGET
            if outside.any():
                place = int(outside.nonzero()[0])
                return (
                    f"row {number} has {ids[place]} in {name} at place {place}, but the model's token ids are 0 to "
                    f"{vocab_size - 1}: use the tokenizer that belongs to the model"
                )
    return ""


def _fingerprint(batches: Sequence[PackedBatch]) -> int:
    """Of the tokens, which must be the same on all ranks of a data rank."""
    found = 0
    for batch in batches:
        found = zlib.crc32(repr((batch.lengths, batch.order, batch.is_empty, sorted(batch.values))).encode(), found)
        for tensor in (batch.input_ids, batch.targets, batch.loss_mask):
            found = zlib.crc32(tensor.contiguous().numpy().tobytes(), found)
    return found


def _mixture(batches: Sequence[PackedBatch]) -> int:
    """Of the rows' values, which must be the same but for rounding: their sum with other weights in every place,
    relative to the sum of their sizes, in 1 / `UNITS`."""
    total = size = 0.0
    for batch in batches:
        for name in sorted(batch.values):
            values = batch.values[name].detach().to("cpu", torch.float64).nan_to_num()
            total += float(values @ torch.arange(len(values), dtype=torch.float64).add(len(name)).cos())
            size += float(values.abs().sum())
    return round(UNITS * total / size) if size else 0
