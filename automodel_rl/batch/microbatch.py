"""Microbatches: several sequences back to back in one row of tokens (the THD layout), never padded.

Alignment: in a `TokenSequence`, a per-token value stands at the token it describes. In a microbatch, it stands at the
position that *predicts* the token: `loss_mask[t]` and `values[name][t]` describe `targets[t]`, the token after
`input_ids[t]`. `pack_microbatch` and `add_values` shift values to the predicting position, `unpack` shifts them back.
Nothing else in the package shifts.

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
"""Tokens of the sequence in an empty microbatch; some for every rank, since compiled layers run on two or more."""


@dataclass(frozen=True)
class TokenSequence:
    """One tokenised sequence, every field aligned with its own tokens.

    Attributes:
        input_ids: token ids, int64 [n].
        loss_mask: True for the tokens that count in the loss, bool [n]. The first token is never predicted, so its
            entry has no effect.
        values: further per-token tensors by name, each [n] or [n, K].
        routes: the experts that a mixture must send the tokens to; None if its routers choose.
        media: the images and clips, in the order of their tokens.

    Raises:
        ValueError: a tensor has another dtype or shape than stated here, or tokens of media are not in the sequence.

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
            raise ValueError(f"routes have {len(self.routes)} rows for {len(self)} tokens: a row for each is needed")
        for name, tensor in {"loss_mask": self.loss_mask, **self.values}.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} is a {type(tensor).__name__}: a torch tensor is needed, one entry a token")
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
    """One row of tokens that one forward runs: packed sequences. Per-token values stand at the position that predicts
    the token.

    A dataclass is a single leaf to pytree, so pipeline schedules pass it on untouched.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T], starting at 0 in every sequence.
        targets: the next token of the same sequence, int64 [T]; `IGNORED_TARGET` at the end of every sequence.
        loss_mask: True for targets that count in the loss, bool [T].
        cu_seqlens: the starts of the sequences, and T at the end, int32 [N + 1].
        lengths: tokens of every sequence; on the host, so that reading them never waits for the device.
        order: for every sequence, its place in the list that was packed.
        values: further per-token tensors [T] or [T, K] by name.
        routes: the experts that a mixture must send the tokens to, at least for this rank's layers; on the host.
        media: the images and clips, in order; each `start` is a place in the microbatch.
        tokens: further inputs of the model [T, ...] by name (batch/tensors.py), each row at its own token.
        is_empty: True for a microbatch that only takes part in collectives. It has no effect on losses or gradients.

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
        """T. It is above 0 even for an empty microbatch, which has filler tokens."""
        return sum(self.lengths)

    @property
    def num_sequences(self) -> int:
        """Number of real sequences; 0 for an empty microbatch."""
        return 0 if self.is_empty else len(self.lengths)

    @property
    def sequence_ids(self) -> Tensor:
        """The number of each token's sequence, 0 to N - 1, int64 [T]; on the microbatch's device."""
        return torch.zeros_like(self.input_ids).index_fill_(0, self.cu_seqlens[1:-1].long(), 1).cumsum(0)

    def to(self, device: torch.device) -> "Microbatch":
        """The same microbatch with its tensors on another device. Routes and images stay: losses do not use them.

        Args:
            device: where the tensors go; a copy from the host to CUDA does not wait for the device.
        """
        tensors: dict[str, Any] = {
            f.name: move(getattr(self, f.name), device)
            for f in dataclasses.fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        values = {name: move(value, device) for name, value in self.values.items()}
        tokens = {name: move(rows, device) for name, rows in self.tokens.items()}
        return dataclasses.replace(self, **tensors, values=values, tokens=tokens)


def pack_microbatch(sequences: Sequence[TokenSequence], order: Sequence[int] | None = None) -> Microbatch:
    """One microbatch of the given sequences, in their order.

    Args:
        sequences: at least one; each at least one token long, all with the same names in `values`.
        order: places of the sequences in the list they come from; by default 0, 1, 2, ...

    Raises:
        ValueError: there are no sequences, one has no tokens, or some have values or routes that others lack.
    """
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
    """Checks that sequences can be packed together.

    Args:
        sequences: sequences of one global batch.
        places: their places in the list they come from, for error messages.

    Raises:
        ValueError: a sequence has no tokens, or its values have other names, or other numbers of entries for a token,
            than those of the first sequence.
    """
    for place, sequence in zip(places, sequences, strict=True):
        if not len(sequence):
            raise ValueError(f"sequence {place} has no tokens: leave it out")
        if sequence.values.keys() != sequences[0].values.keys():
            raise ValueError(
                f"sequence {place} has values {sorted(sequence.values)} but sequence {places[0]} has "
                f"{sorted(sequences[0].values)}: sequences that are packed together need values of the same names"
            )
        for name, tensor in sequence.values.items():
            like = sequences[0].values[name]
            if tensor.shape[1:] != like.shape[1:]:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} in sequence {place} but {tuple(like.shape)} in sequence "
                    f"{places[0]}: sequences that are packed together need as many entries for each token"
                )


def empty_microbatch(like: Microbatch | None = None) -> Microbatch:
    """A microbatch that takes part in every collective and has no effect on losses or gradients.

    Args:
        like: a microbatch whose names and dtypes of values it gets; None for no values.
    """
    zeros = torch.zeros(EMPTY_LENGTH, dtype=torch.int64)
    given = {} if like is None else like.values
    values = {n: v.new_zeros(EMPTY_LENGTH, *v.shape[1:], device="cpu") for n, v in given.items()}
    microbatch = pack_microbatch([TokenSequence(zeros, torch.zeros(EMPTY_LENGTH, dtype=torch.bool), values)])
    return dataclasses.replace(microbatch, order=(), is_empty=True)


def unpack(values: Tensor, microbatch: Microbatch) -> list[Tensor]:
    """Per-token results of a microbatch, split by sequence, each at the token it describes.

    Args:
        values: results [T, ...], each at the position that predicts its token.
        microbatch: the microbatch that the results are for.

    Returns:
        One tensor [n, ...] for each real sequence. Its first entry is 0, because nothing predicts the first token.

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
    """Results of sequences, put into the order of the list that was packed.

    `Engine.logprobs` returns results microbatch by microbatch, which is another order.

    Args:
        results: one result for each real sequence, microbatch by microbatch.
        microbatches: all microbatches of one call of `pack`.

    Returns:
        The same results; the first belongs to the first sequence of the packed list.

    Raises:
        ValueError: there are more or fewer results than sequences.

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
            f"{len(results)} results for {len(places)} sequences: give one for each sequence of the microbatches"
        )
    return [result for _, result in sorted(zip(places, results, strict=True), key=lambda pair: pair[0])]


def set_values(microbatch: Microbatch, name: str, values: Tensor) -> Microbatch:
    """The microbatch with one more per-token tensor.

    Args:
        microbatch: the microbatch.
        name: the tensor's name in `Microbatch.values`.
        values: the tensor [T] or [T, K]; each entry stands at the position that predicts its token.
    """
    return dataclasses.replace(microbatch, values={**microbatch.values, name: values})


def add_values(microbatch: Microbatch, name: str, pieces: Sequence[Tensor], shape: tuple[int, ...] = ()) -> Microbatch:
    """The microbatch with one more per-token tensor, which is made from a piece for each sequence.

    Args:
        microbatch: the microbatch; an empty one takes no pieces and gets zeros.
        name: the tensor's name in `Microbatch.values`.
        pieces: one tensor [n, *shape] for each real sequence, each entry at the token it describes, as `unpack` returns
            them.
        shape: the shape of a token's entry, () or (K,).
    """
    shifted = [to_predictor(piece) for piece in pieces]
    zeros = torch.zeros(microbatch.num_tokens, *shape)
    return set_values(microbatch, name, zeros if microbatch.is_empty else torch.cat(shifted))


def sum_by_sequence(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Sums per-token values [T] over each sequence: [N], same dtype. The order is fixed, unlike index_add's on CUDA."""
    # unsafe=True skips a check of the lengths, which would wait for the device.
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
    """Moves each value one place to the left, onto the position that predicts its token."""
    return torch.cat([values[1:], values.new_zeros(1, *values.shape[1:])])


def to_token(values: Tensor) -> Tensor:
    """Moves each value one place to the right, onto the token that its position predicts; the first entry is 0."""
    return torch.cat([values.new_zeros(1, *values.shape[1:]), values[:-1]])
