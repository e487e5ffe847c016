"""Microbatch: one microbatch, several sequences back to back in a single microbatch (the THD layout), never padded.

Alignment. Outside, a per-token value belongs to the token it describes. Inside a microbatch, everything is aligned with
the position that *predicts*: `loss_mask[t]` and `values[name][t]` describe `targets[t]`, the token after
`input_ids[t]`. `pack_microbatch` and `add_values` shift one way, `unpack` the other; nothing else in the package
shifts.

Shape letters: T tokens of a microbatch, N its sequences, n the tokens of one sequence.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from automodel_rl.batch.images import Image, check_images
from automodel_rl.batch.move import move
from automodel_rl.batch.routes import Routes, join_routes

T = TypeVar("T")

IGNORED_TARGET = -100
"""Target of a position that predicts nothing: the last one of every sequence."""

EMPTY_LENGTH = 2
"""Tokens of the sequence in an empty microbatch; two, so that attention and the loss have something to run on."""


@dataclass(frozen=True)
class TokenSequence:
    """One tokenised sequence, every field aligned with its own tokens.

    Attributes:
        input_ids: token ids, int64 [n].
        loss_mask: True for the tokens that count in the loss, bool [n]. The first token is never predicted, so its
            entry has no effect.
        values: further per-token tensors by name, each [n].
        routes: experts that a mixture is to send its tokens to; None, and it chooses by itself.
        images: in the order of their tokens.

    Raises:
        ValueError: a tensor has another dtype or shape than said here, or an image's tokens are not there.

    Example:
        >>> import torch
        >>> len(TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, True, True])))
        3
    """

    input_ids: Tensor
    loss_mask: Tensor
    values: dict[str, Tensor] = field(default_factory=dict)
    routes: Routes | None = None
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        _check_tensor("input_ids", self.input_ids, torch.int64, "token ids in one dimension")
        _check_tensor("loss_mask", self.loss_mask, torch.bool, "True for the tokens that count")
        check_images(self.images, len(self))
        if self.routes is not None and len(self.routes) != len(self):
            raise ValueError(f"routes have {len(self.routes)} rows for {len(self)} tokens: a row for each is needed")
        for name, tensor in {"loss_mask": self.loss_mask, **self.values}.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} is a {type(tensor).__name__}: a torch tensor is needed, one entry a token")
            if tensor.shape != self.input_ids.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} but input_ids {tuple(self.input_ids.shape)}: "
                    "a per-token tensor needs one entry for each token"
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
    """One microbatch, aligned with predicting positions (see the module's text).

    A dataclass is a single leaf to pytree, so pipeline schedules pass it on untouched.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T], starting at 0 in every sequence.
        targets: the next token of the same sequence, int64 [T]; `IGNORED_TARGET` at the end of every sequence.
        loss_mask: which targets count, bool [T].
        cu_seqlens: where sequences start, and T, int32 [N + 1].
        lengths: tokens of every sequence; on the host, so that nobody waits for the device to read them.
        order: for every sequence, its place in the list that was packed.
        values: further per-token tensors [T] by name.
        routes: experts that a mixture is to send its tokens to, for the layers of this rank at least; on the host.
        images: by their places in the microbatch, in order.
        is_empty: True for a microbatch that only keeps collectives in step and counts for nothing.

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
    images: tuple[Image, ...] = ()
    is_empty: bool = False

    def __post_init__(self) -> None:
        if self.routes is not None and len(self.routes) != self.num_tokens:
            raise ValueError(f"routes have {len(self.routes)} rows for the {self.num_tokens} tokens of a microbatch")

    @property
    def num_tokens(self) -> int:
        """T, also of an empty microbatch."""
        return sum(self.lengths)

    @property
    def num_sequences(self) -> int:
        """Real sequences; none in an empty microbatch."""
        return 0 if self.is_empty else len(self.lengths)

    @property
    def sequence_ids(self) -> Tensor:
        """Which sequence of the microbatch each token belongs to, int64 [T]; on the microbatch's device."""
        return torch.zeros_like(self.input_ids).index_fill_(0, self.cu_seqlens[1:-1].long(), 1).cumsum(0)

    def to(self, device: torch.device) -> "Microbatch":
        """The same microbatch with its tensors on another device, but for routes and images, which losses have no use
        for.

        Args:
            device: from the host to CUDA without waiting.
        """
        tensors: dict[str, Any] = {
            f.name: move(getattr(self, f.name), device)
            for f in dataclasses.fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        values = {name: move(value, device) for name, value in self.values.items()}
        return dataclasses.replace(self, **tensors, values=values)


def pack_microbatch(sequences: Sequence[TokenSequence], order: Sequence[int] | None = None) -> Microbatch:
    """One microbatch of the given sequences, in their order.

    Args:
        sequences: at least one; each at least one token long, all with the same names in `values`.
        order: places of the sequences in the list they come from; by default 0, 1, 2, ...

    Raises:
        ValueError: no sequences, one without tokens, or some with values or routes and others without.
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
        loss_mask=torch.cat([_to_predictor(s.loss_mask) for s in sequences]),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        lengths=lengths,
        order=order,
        values={name: torch.cat([_to_predictor(s.values[name]) for s in sequences]) for name in names},
        routes=join_routes([s.routes for s in sequences]),
        images=tuple(i.moved(start) for s, start in zip(sequences, starts, strict=False) for i in s.images),
    )


def check_sequences(sequences: Sequence[TokenSequence], places: Sequence[int]) -> None:
    """Whether sequences can be packed together.

    Args:
        sequences: of one global batch.
        places: of theirs in the list they come from, for messages.

    Raises:
        ValueError: one has no tokens, or other values than the first.
    """
    for place, sequence in zip(places, sequences, strict=True):
        if not len(sequence):
            raise ValueError(f"sequence {place} has no tokens: leave it out")
        if sequence.values.keys() != sequences[0].values.keys():
            raise ValueError(
                f"sequence {place} has values {sorted(sequence.values)} but sequence {places[0]} has "
                f"{sorted(sequences[0].values)}: sequences that are packed together need values of the same names"
            )


def empty_microbatch(like: Microbatch | None = None) -> Microbatch:
    """A microbatch that joins every collective and counts for nothing; `like` gives the names and dtypes of its
    values."""
    zeros = torch.zeros(EMPTY_LENGTH, dtype=torch.int64)
    values = {} if like is None else {n: v.new_zeros(EMPTY_LENGTH, device="cpu") for n, v in like.values.items()}
    microbatch = pack_microbatch([TokenSequence(zeros, torch.zeros(EMPTY_LENGTH, dtype=torch.bool), values)])
    return dataclasses.replace(microbatch, order=(), is_empty=True)


def unpack(values: Tensor, microbatch: Microbatch) -> list[Tensor]:
    """Per-token results of a microbatch, split by sequence and aligned with the tokens again.

    Args:
        values: [T, ...], aligned with predicting positions.
        microbatch: the microbatch they belong to.

    Returns:
        One tensor [n, ...] for each real sequence; its first entry, which nothing predicts, is 0.

    Example:
        >>> import torch
        >>> sequences = [TokenSequence(torch.arange(n), torch.ones(n, dtype=torch.bool)) for n in (3, 2)]
        >>> (microbatch,) = pack(sequences, capacity=8)
        >>> [piece.tolist() for piece in unpack(torch.tensor([0.1, 0.2, 0.0, 0.3, 0.0]), microbatch)]
        [[0.0, 0.10000000149011612, 0.20000000298023224], [0.0, 0.30000001192092896]]
    """
    if microbatch.is_empty:
        return []
    return [_to_token(piece) for piece in values.split(microbatch.lengths)]


def in_packed_order(results: Sequence[T], microbatches: Sequence[Microbatch]) -> list[T]:
    """Results of sequences, such as `Engine.logprobs` gives them microbatch by microbatch, in the order in which they
    were packed.

    Args:
        results: one for each real sequence, in the order in which the microbatches hold them.
        microbatches: the microbatches, all of one `pack`.

    Returns:
        The same results; those of the sequence that came first in the packed list first.

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
    """The microbatch with one more per-token tensor [T], which is aligned with predicting positions already."""
    return dataclasses.replace(microbatch, values={**microbatch.values, name: values})


def add_values(microbatch: Microbatch, name: str, pieces: Sequence[Tensor]) -> Microbatch:
    """The microbatch with one more per-token tensor, of pieces that are aligned with tokens.

    Args:
        microbatch: the microbatch; an empty one takes no pieces and gets zeros.
        name: of the tensor in `values`.
        pieces: for each real sequence [n], aligned with its tokens, as `unpack` gives them.
    """
    shifted = [_to_predictor(piece) for piece in pieces]
    return set_values(
        microbatch, name, torch.zeros(microbatch.num_tokens) if microbatch.is_empty else torch.cat(shifted)
    )


def sum_by_sequence(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Sums [T] over the tokens of each sequence: [N], same dtype. In a fixed order, unlike an index_add on CUDA."""
    # unsafe: the check of the lengths would wait for the device.
    return torch.segment_reduce(values, "sum", lengths=microbatch.cu_seqlens.diff().long(), unsafe=True)


def spread_over_tokens(values: Tensor, microbatch: Microbatch) -> Tensor:
    """For every token the value [N] of its sequence: [T]."""
    return _SpreadOverTokens.apply(values, microbatch)


class _SpreadOverTokens(torch.autograd.Function):
    """A gather whose gradient adds up in a fixed order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, microbatch: Microbatch) -> Tensor:
        ctx.batch = microbatch
        return values[microbatch.sequence_ids]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sum_by_sequence(gradients[0], ctx.batch), None


def _to_predictor(values: Tensor) -> Tensor:
    """Moves each value one place to the left, onto the position that predicts its token."""
    return torch.cat([values[1:], values.new_zeros(1)])


def _to_token(values: Tensor) -> Tensor:
    return torch.cat([values.new_zeros(1, *values.shape[1:]), values[:-1]])
