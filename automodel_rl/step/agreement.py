"""Agreement of ranks: before a step that their microbatches match, after it that all fail if one has.

A rank that raised alone would leave the others hanging in a collective.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_rl.batch import IGNORED_TARGET, Microbatch
from automodel_rl.errors import InputError, MicrobatchError, PeerError
from automodel_rl.launch.flight import flight
from automodel_rl.losses import Denominator, count
from automodel_rl.parallel.host_collectives import any_rank, gather_objects, gather_rows
from automodel_rl.parallel.layout import Layout

OUTSIDER = -1
"""Data rank reported by ranks without the language model."""

UNITS, ROUNDING = 10_000, 10
"""Summaries of microbatch values are compared in units of 1 / `UNITS` of their magnitude, and may differ by
`ROUNDING`."""


@dataclass(frozen=True)
class GlobalBatch:
    """The microbatches of all data ranks together.

    Attributes:
        num_microbatches: microbatches per data rank, including empty ones.
        counts: the global denominators of losses.

    Example:
        >>> import torch
        >>> runner = StepRunner(ModelHandle.from_pretrained(checkpoint))
        >>> sequence = TokenSequence(torch.tensor([5, 6]), torch.tensor([False, True]))
        >>> runner.global_batch(pack([sequence], capacity=8)).counts["positions"]
        2
    """

    num_microbatches: int
    counts: dict[Denominator, int]


def agree_on_batch(microbatches: Sequence[Microbatch], vocab_size: int, layout: Layout) -> GlobalBatch:
    """Checks that the microbatches of all ranks fit the model and each other, and counts their contents. A
    collective.

    Raises:
        InputError: on every rank, if a microbatch is not on the host or has token ids outside the vocabulary, data
            ranks have different numbers of microbatches, or the ranks of a data rank have different ones.
    """
    problem = _problem(microbatches, vocab_size)
    counts = count(microbatches)
    reported: dict[str, int] = {
        "data_rank": OUTSIDER if layout.is_outsider else layout.data_rank,
        "is_first": int(layout.is_first_of_data_rank),
        "problem": int(problem != ""),
        "num_microbatches": len(microbatches),
        "fingerprint": 0 if problem else _fingerprint(microbatches),
        "value_summary": 0 if problem else _value_summary(microbatches),
        **{str(name): number for name, number in counts.items()},
    }
    own = torch.tensor(list(reported.values()))
    of_ranks = dict(zip(reported, gather_rows(own, layout.world_control).unbind(1), strict=True))
    if of_ranks["problem"].any():
        problems = gather_objects(problem, layout.world_control)
        raise InputError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text))
    num_microbatches = _agreed_microbatches(of_ranks)
    is_first = of_ranks["is_first"] == 1
    return GlobalBatch(num_microbatches, {name: int(of_ranks[name][is_first].sum()) for name in counts})


def _agreed_microbatches(of_ranks: dict[str, Tensor]) -> int:
    """Returns the number of microbatches per data rank. Raises InputError if the ranks' reports disagree."""
    is_first, data_rank = of_ranks["is_first"] == 1, of_ranks["data_rank"]

    def by_data_rank(name: str) -> Tensor:
        """Returns the reports of each data rank's first rank."""
        return of_ranks[name][is_first][data_rank[is_first].argsort()]

    for name, allowed, what in (
        ("num_microbatches", 0, "microbatches"),
        ("fingerprint", 0, "microbatches"),
        ("value_summary", ROUNDING, "values in their microbatches"),
    ):
        expected = by_data_rank(name)[data_rank.clamp_min(0)]
        others = (data_rank != OUTSIDER) & ((of_ranks[name] - expected).abs() > allowed)
        if others.any():
            raise InputError(
                f"the ranks of data rank {data_rank[others][0]} have different {what}: all pipeline, tensor and "
                "context-parallel ranks of a data rank need the same ones, in the same order"
            )
    num_microbatches = by_data_rank("num_microbatches").tolist()
    if len(set(num_microbatches)) > 1:
        raise InputError(
            f"data ranks have {num_microbatches} microbatches: pass each the same number, as pack(..., "
            f"share=DataShare(rank=R, count={len(num_microbatches)})) does"
        )
    return num_microbatches[0]


def raise_everywhere(failure: MicrobatchError | None, layout: Layout) -> None:
    """Raises this rank's failure or, if it has none, another rank's. A collective: a failed rank still completes its
    pass first."""
    if not any_rank([failure is not None], layout)[0]:
        return
    failures = gather_objects(None if failure is None else (failure.place, str(failure)), layout.world_control)
    if failure is not None:
        with flight.phase(failure.place):
            raise failure
    rank, (place, text) = next((rank, other) for rank, other in enumerate(failures) if other is not None)
    raise PeerError(rank, place, text)


def _problem(microbatches: Sequence[Microbatch], vocab_size: int) -> str:
    """Returns an error message if this rank's microbatches are invalid, else ""."""
    for number, microbatch in enumerate(microbatches):
        if microbatch.input_ids.device.type != "cpu":
            return (
                f"microbatch {number} is on {microbatch.input_ids.device}: keep microbatches on the host, the step "
                "moves them"
            )
        for name, ids in (("input_ids", microbatch.input_ids), ("targets", microbatch.targets)):
            outside = (ids < 0) | (ids >= vocab_size)
            if name == "targets":
                outside &= ids != IGNORED_TARGET
            if outside.any():
                place = int(outside.nonzero()[0])
                return (
                    f"microbatch {number} has {ids[place]} in {name} at place {place}, but the model's token ids are "
                    f"0 to {vocab_size - 1}: use the tokenizer that belongs to the model"
                )
    return ""


def _fingerprint(microbatches: Sequence[Microbatch]) -> int:
    """Checksum of the tokens, which must be equal on all ranks of a data rank."""
    found = 0
    for microbatch in microbatches:
        found = zlib.crc32(
            repr((microbatch.lengths, microbatch.order, microbatch.is_empty, sorted(microbatch.values))).encode(), found
        )
        for tensor in (microbatch.input_ids, microbatch.targets, microbatch.loss_mask):
            found = zlib.crc32(tensor.contiguous().numpy().tobytes(), found)
    return found


def _value_summary(microbatches: Sequence[Microbatch]) -> int:
    """Summary of the microbatches' values, which must be equal on all ranks of a data rank up to rounding: a sum
    weighted differently at every index, relative to the sum of magnitudes, in units of 1 / `UNITS`."""
    total = size = 0.0
    for microbatch in microbatches:
        for name in sorted(microbatch.values):
            values = microbatch.values[name].detach().to("cpu", torch.float64).nan_to_num(0.0, 0.0, 0.0)
            total += float(values.flatten() @ torch.arange(values.numel(), dtype=torch.float64).add(len(name)).cos())
            size += float(values.abs().sum())
    return round(UNITS * total / size) if size else 0
