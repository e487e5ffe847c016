"""Microbatches: several sequences concatenated without padding (the THD layout).

Alignment: in a `TokenSequence`, per-token values are aligned with the token they describe. In a microbatch, they are
aligned with the position that *predicts* the token: `loss_mask[t]` and `values[name][t]` describe `targets[t]`, the
token after `input_ids[t]`. `pack_microbatch` and `add_values` shift values to the predicting position, `unpack` shifts
them back. Nothing else in the package shifts.

Shape letters: T tokens of a microbatch, N its sequences, n the tokens of one sequence.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from automodel_rl.batch.media import Media, check_media
from automodel_rl.batch.routes import Routes, join_routes
from automodel_rl.batch.tensors import move

T = TypeVar("T")

IGNORED_TARGET = -100
"""Target of a position that predicts nothing: the last one of every sequence."""

EMPTY_LENGTH = 64
"""Tokens in an empty microbatch: enough for two or more per rank, as compiled layers require."""


@dataclass(frozen=True)
class TokenSequence:
    """A tokenised sequence. All fields are aligned with its own tokens.

    Attributes:
        input_ids: token ids, int64 [n].
        loss_mask: True for tokens that count in the loss, bool [n]. No effect on the first token, which is never
            predicted.
        values: additional per-token tensors by name, [n] or [n, K].
        routes: experts to replay for the tokens of a mixture; None if its routers choose.
        media: images and clips, in the order of their tokens.

    Raises:
        ValueError: a tensor has the wrong dtype or shape, or media exceed the sequence.

    Example:
        >>> import torch
        >>> len(TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, True, True])))
        3
    """

    input_ids: Tensor
    loss_mask: Tensor
    values: dict[str, Tensor] = field(default_factory=dict)
    routes: Routes | None = None
    media: tuple[Media, ...] = ()

    def __post_init__(self) -> None:
        _check_tensor("input_ids", self.input_ids, torch.int64, "token ids in one dimension")
        _check_tensor("loss_mask", self.loss_mask, torch.bool, "True for the tokens that count")
        check_media(self.media, len(self))
        if self.routes is not None and len(self.routes) != len(self):
            raise ValueError(f"routes have {len(self.routes)} rows for {len(self)} tokens: expected one row per token")
        for name, tensor in {"loss_mask": self.loss_mask, **self.values}.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"{name} is a {type(tensor).__name__}: expected a torch tensor with one entry per token"
                )
            if tensor.shape[:1] != self.input_ids.shape or tensor.ndim > 2:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} but input_ids {tuple(self.input_ids.shape)}: "
                    "a per-token tensor needs one entry for each token, or K for each"
                )

    def __len__(self) -> int:
        return self.input_ids.numel()


def _check_tensor(name: str, tensor: Any, dtype: torch.dtype, meaning: str) -> None:
    if not isinstance(tensor, Tensor):
        given = f"a {type(tensor).__name__}"
    elif tensor.dtype != dtype or tensor.ndim != 1:
        given = f"of {tensor.dtype} with shape {tuple(tensor.shape)}"
    else:
        return
    raise ValueError(f"{name} is {given}: it must be a tensor [n] of {dtype}, {meaning}")


@dataclass(frozen=True)
class Microbatch:
    """Packed sequences for one forward. Position t holds the values for token t + 1.

    A dataclass is a single leaf to pytree, so pipeline schedules pass it through unchanged.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T], starting at 0 in every sequence.
        targets: next token of the same sequence, int64 [T]; `IGNORED_TARGET` at the end of every sequence.
        loss_mask: True for targets that count in the loss, bool [T].
        cu_seqlens: sequence starts, with T at the end, int32 [N + 1].
        lengths: tokens of each sequence; on the host, so that reading them does not synchronise.
        order: index of each sequence in the packed list.
        values: additional per-token tensors [T] or [T, K] by name.
        routes: experts to replay, at least for this rank's layers; on the host.
        media: images and clips, in order; `start` is an index in the microbatch.
        tokens: additional model inputs [T, ...] by name (batch/tensors.py), aligned with their own tokens.
        is_empty: True for a microbatch that only takes part in collectives, without effect on losses or gradients.

    Example:
        >>> import torch
        >>> mask = torch.tensor([False, True, True])
        >>> (microbatch,) = pack([TokenSequence(torch.tensor([5, 6, 7]), mask)], capacity=8)
        >>> microbatch.targets.tolist(), microbatch.loss_mask.tolist()  # the last position predicts nothing
        ([6, 7, -100], [True, True, False])
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    order: tuple[int, ...]
    values: dict[str, Tensor] = field(default_factory=dict)
    routes: Routes | None = None
    media: tuple[Media, ...] = ()
    tokens: dict[str, Tensor] = field(default_factory=dict)
    is_empty: bool = False

    def __post_init__(self) -> None:
        if self.routes is not None and len(self.routes) != self.num_tokens:
            raise ValueError(f"routes have {len(self.routes)} rows for the {self.num_tokens} tokens of a microbatch")

    @property
    def num_tokens(self) -> int:
        """T; above 0 even for an empty microbatch, which has filler tokens."""
        return sum(self.lengths)

    @property
    def num_sequences(self) -> int:
        """Number of real sequences; 0 for an empty microbatch."""
        return 0 if self.is_empty else len(self.lengths)

    @property
    def sequence_ids(self) -> Tensor:
        """Index of each token's sequence, 0 to N - 1, int64 [T]; on the microbatch's device."""
        return torch.zeros_like(self.input_ids).index_fill_(0, self.cu_seqlens[1:-1].long(), 1).cumsum(0)

    def to(self, device: torch.device) -> "Microbatch":
        """Moves all tensors to `device`, without synchronising for host-to-CUDA copies. Routes and media stay: losses
        do not use them."""
        tensors: dict[str, Any] = {
            f.name: move(getattr(self, f.name), device)
            for f in dataclasses.fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        values = {name: move(value, device) for name, value in self.values.items()}
        tokens = {name: move(rows, device) for name, rows in self.tokens.items()}
        return dataclasses.replace(self, **tensors, values=values, tokens=tokens)


def pack_microbatch(sequences: Sequence[TokenSequence], order: Sequence[int] | None = None) -> Microbatch:
    """Packs sequences into one microbatch, in the given order. They need at least one token each and the same names in
    `values`. `order` holds their indices in their original list, 0, 1, 2, ... by default."""
    if not sequences:
        raise ValueError(
            "pack_microbatch needs at least one sequence; use empty_microbatch() for a microbatch without any"
        )
    order = tuple(range(len(sequences)) if order is None else order)
    check_sequences(sequences, order)
    lengths = tuple(len(sequence) for sequence in sequences)
    starts = [0, *itertools.accumulate(lengths)]
    end = torch.tensor([IGNORED_TARGET])
    names = sequences[0].values.keys()
    return Microbatch(
        input_ids=torch.cat([s.input_ids for s in sequences]),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        targets=torch.cat([part for s in sequences for part in (s.input_ids[1:], end)]),
        loss_mask=torch.cat([to_predictor(s.loss_mask) for s in sequences]),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        lengths=lengths,
        order=order,
        values={name: torch.cat([to_predictor(s.values[name]) for s in sequences]) for name in names},
        routes=join_routes([s.routes for s in sequences]),
        media=tuple(i.moved(start) for s, start in zip(sequences, starts, strict=False) for i in s.media),
    )


def check_sequences(sequences: Sequence[TokenSequence], places: Sequence[int]) -> None:
    """Raises ValueError if a sequence is empty, or its values differ from those of the first in name or number of
    entries per token. `places` are indices for error messages."""
    for place, sequence in zip(places, sequences, strict=True):
        if not len(sequence):
            raise ValueError(f"sequence {place} has no tokens: remove it")
        if sequence.values.keys() != sequences[0].values.keys():
            raise ValueError(
                f"sequence {place} has values {sorted(sequence.values)} but sequence {places[0]} has "
                f"{sorted(sequences[0].values)}: sequences that are packed together need the same names of values"
            )
        for name, tensor in sequence.values.items():
            like = sequences[0].values[name]
            if tensor.shape[1:] != like.shape[1:]:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} in sequence {place} but {tuple(like.shape)} in sequence "
                    f"{places[0]}: sequences that are packed together need equally many entries for each token"
                )


def empty_microbatch(like: Microbatch | None = None) -> Microbatch:
    """Returns a microbatch that takes part in every collective without effect on losses or gradients, with values of
    the names and dtypes of `like`, if given."""
    zeros = torch.zeros(EMPTY_LENGTH, dtype=torch.int64)
    given = {} if like is None else like.values
    values = {n: v.new_zeros(EMPTY_LENGTH, *v.shape[1:], device="cpu") for n, v in given.items()}
    microbatch = pack_microbatch([TokenSequence(zeros, torch.zeros(EMPTY_LENGTH, dtype=torch.bool), values)])
    return dataclasses.replace(microbatch, order=(), is_empty=True)


def unpack(values: Tensor, microbatch: Microbatch) -> list[Tensor]:
    """Splits per-token results of a microbatch by sequence, and aligns them with the tokens they describe.

    Args:
        values: results [T, ...], aligned with predicting positions.
        microbatch: the microbatch of the results.

    Returns:
        One tensor [n, ...] per real sequence. Its first entry is 0, because nothing predicts the first token.

    Example:
        >>> import torch
        >>> sequences = [TokenSequence(torch.arange(n), torch.ones(n, dtype=torch.bool)) for n in (3, 2)]
        >>> (microbatch,) = pack(sequences, capacity=8)
        >>> [piece.tolist() for piece in unpack(torch.tensor([0.1, 0.2, 0.0, 0.3, 0.0]), microbatch)]
        [[0.0, 0.10000000149011612, 0.20000000298023224], [0.0, 0.30000001192092896]]
    """
    if microbatch.is_empty:
        return []
    return [to_token(piece) for piece in values.split(microbatch.lengths)]


def in_packed_order(results: Sequence[T], microbatches: Sequence[Microbatch]) -> list[T]:
    """Reorders results of sequences to the order of the packed list.

    `Engine.logprobs` returns results microbatch by microbatch, in a different order.

    Args:
        results: one result per real sequence, microbatch by microbatch.
        microbatches: all microbatches of one call of `pack`.

    Raises:
        ValueError: the numbers of results and sequences differ.

    Example:
        >>> import torch
        >>> sequences = [TokenSequence(torch.arange(n), torch.ones(n, dtype=torch.bool)) for n in (2, 4, 3)]
        >>> microbatches = pack(sequences, capacity=5)
        >>> lengths = [length for microbatch in microbatches for length in microbatch.lengths]
        >>> lengths, in_packed_order(lengths, microbatches)
        ([3, 2, 4], [2, 4, 3])
    """
    places = [place for microbatch in microbatches for place in microbatch.order]
    if len(places) != len(results):
        raise ValueError(
            f"{len(results)} results for {len(places)} sequences: pass one for each sequence of the microbatches"
        )
    return [result for _, result in sorted(zip(places, results, strict=True), key=lambda pair: pair[0])]


def set_values(microbatch: Microbatch, name: str, values: Tensor) -> Microbatch:
    """Returns the microbatch with an additional per-token tensor [T] or [T, K], aligned with predicting positions."""
    return dataclasses.replace(microbatch, values={**microbatch.values, name: values})


def add_values(microbatch: Microbatch, name: str, pieces: Sequence[Tensor], shape: tuple[int, ...] = ()) -> Microbatch:
    """Returns the microbatch with an additional per-token tensor, from one piece [n, *shape] per real sequence, aligned
    with the tokens they describe, as from `unpack`. An empty microbatch takes no pieces and gets zeros. `shape` is that
    of a token's entry, () or (K,)."""
    shifted = [to_predictor(piece) for piece in pieces]
    zeros = torch.zeros(microbatch.num_tokens, *shape)
    return set_values(microbatch, name, zeros if microbatch.is_empty else torch.cat(shifted))


def sum_by_sequence(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Sums per-token values [T] over each sequence: [N], same dtype. The order of summation is fixed, unlike that of
    index_add on CUDA."""
    # unsafe=True skips a check of the lengths, which would synchronise with the device.
    return torch.segment_reduce(values, "sum", lengths=microbatch.cu_seqlens.diff().long(), unsafe=True)


def spread_over_tokens(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Repeats a value per sequence [N] for each of its tokens: [T]."""
    return _SpreadOverTokens.apply(values, microbatch)


class _SpreadOverTokens(torch.autograd.Function):
    """A gather whose gradient is summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, microbatch: Microbatch) -> Tensor:
        ctx.batch = microbatch
        return values[microbatch.sequence_ids]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sum_by_sequence(gradients[0], ctx.batch), None


def to_predictor(values: Tensor) -> Tensor:
    """Shifts values left by one, from each token to the position that predicts it. The last entry becomes 0."""
    return torch.cat([values[1:], values.new_zeros(1, *values.shape[1:])])


def to_token(values: Tensor) -> Tensor:
    """Shifts values right by one, from each position to the token it predicts. The first entry becomes 0."""
    return torch.cat([values.new_zeros(1, *values.shape[1:]), values[:-1]])
