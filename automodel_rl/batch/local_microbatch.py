"""One rank's tokens of a microbatch, and the keys that its queries attend to.

Context parallelism cuts every sequence into 2 * cp chunks, padded to equal length. Rank r holds chunks r and 2 * cp - 1
- r of every sequence, which balances causal attention (as for Llama 3, arXiv:2407.21783, section 3.3.2). The keys of
all ranks are gathered, and a rank calls attention twice: queries of its front chunks attend to the chunks up to r,
queries of its back chunks to those up to 2 * cp - 1 - r.

In some models, tokens of an image attend to each other in both directions. They have an additional call, in which a
segment is an image.

Shape letters: T tokens of the microbatch, t tokens of one rank, N sequences.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from automodel_rl.batch.media import NO_MEDIA, MediaTokens, media_places
from automodel_rl.batch.microbatch import IGNORED_TARGET, Microbatch
from automodel_rl.batch.routes import Routes
from automodel_rl.batch.tensors import move, taken

MIN_TOKENS = 2
"""Minimum queries of an attention call: graphs of compiled layers are valid for all sizes but 1."""


@dataclass(eq=False)  # not frozen: torch.compile would specialise graphs on all field values of a frozen dataclass
class AttentionCall:
    """Arguments of one attention call: segments of queries and keys, aligned at the bottom right. Immutable.

    In causal attention the last query of a segment attends to all keys of the segment, the query before it to all but
    the last key, and so on. Otherwise every query attends to all keys, or to those from the start of its window.
    Compiled layers read only the tensors and the two maximum lengths, not the tuples, whose size varies between
    microbatches.

    Attributes:
        queries: indices of the queries among this rank's tokens, int64; None for all of this rank's tokens.
        keys: indices of the keys among the tokens of all ranks, rank 0's first, int64; None for all of this rank's
            tokens. All tokens, with queries None, means that ranks exchange heads; queries and keys are then the tokens
            of all ranks.
        cu_queries, cu_keys: segment starts, with the total at the end, int32 [N + 1].
        query_lengths, key_lengths: segment lengths; on the host.
        is_causal: whether a query attends to no later keys.
        only_windows: whether only layers with a sliding window use the call.
        counted: indices, among the queries, of those whose outputs are used, int64; None for all. Other queries are
            fillers that align a segment's last query with its last key.
        longest_query, longest_key: maximum segment lengths.
    """

    queries: Tensor | None
    keys: Tensor | None
    cu_queries: Tensor
    cu_keys: Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    is_causal: bool = True
    only_windows: bool = False
    counted: Tensor | None = None
    longest_query: int = field(init=False)
    longest_key: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest_query, self.longest_key = max(self.query_lengths), max(self.key_lengths)

    def to(self, device: torch.device) -> "AttentionCall":
        return replace(
            self,
            queries=None if self.queries is None else move(self.queries, device),
            keys=None if self.keys is None else move(self.keys, device),
            cu_queries=move(self.cu_queries, device),
            cu_keys=move(self.cu_keys, device),
            counted=None if self.counted is None else move(self.counted, device),
        )


@dataclass(eq=False)  # not frozen, like `AttentionCall`
class LocalMicrobatch:
    """One rank's tokens of a microbatch. Immutable.

    A dataclass is a single leaf to pytree, so pipeline schedules pass it through unchanged.

    Attributes:
        input_ids, position_ids, targets: int64 [t]; pads have token 0 and no target.
        is_real: False for pads and for the tokens of an empty microbatch, bool [t].
        is_routed: `is_real` of the tokens that the rank's routers process: all, or the rank's share under sequence
            parallelism, bool [t] or [t / tp].
        calls: the causal attention calls.
        image_call: the call for image tokens that attend to each other in both directions, whose outputs replace those
            of `calls`; None if there are none.
        restore: index of each token of the microbatch among the tokens of all ranks, rank 0's first, int64 [T]; None if
            this rank has all tokens in order, without pads.
        num_tokens: t.
        lengths: tokens of each sequence over all ranks, without pads; on the host.
        offsets: position of each token in its sequence, sequence by sequence, int64 [T].
        routes: experts to replay for the tokens of `is_routed`, `MISSING` for pads; None if the routers choose.
        media: media tokens among the rank's tokens.
        tokens: additional model inputs [t, ...] by name (batch/tensors.py); pads have 0.
        index: index among the step's microbatches.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    is_real: Tensor
    is_routed: Tensor
    calls: tuple[AttentionCall, ...]
    restore: Tensor | None
    num_tokens: int
    lengths: tuple[int, ...]
    offsets: Tensor
    image_call: AttentionCall | None = None
    routes: Routes | None = None
    media: MediaTokens = NO_MEDIA
    tokens: dict[str, Tensor] = field(default_factory=dict)
    index: int = 0

    def between_blocks(self, tp: int, tp_rank: int) -> "LocalMicrobatch":
        """Returns the microbatch with the rank's share of the tokens between blocks under sequence parallelism."""
        share = self.num_tokens // tp
        start, stop = tp_rank * share, (tp_rank + 1) * share
        routes = None if self.routes is None else replace(self.routes, experts=self.routes.experts[start:stop])
        return replace(self, is_routed=self.is_real[start:stop], routes=routes, media=self.media.within(start, stop))

    def to(self, device: torch.device) -> "LocalMicrobatch":
        """Moves all tensors to `device`."""
        return replace(
            self,
            input_ids=move(self.input_ids, device),
            position_ids=move(self.position_ids, device),
            targets=move(self.targets, device),
            is_real=move(self.is_real, device),
            is_routed=move(self.is_routed, device),
            calls=tuple(call.to(device) for call in self.calls),
            image_call=None if self.image_call is None else self.image_call.to(device),
            restore=None if self.restore is None else move(self.restore, device),
            offsets=move(self.offsets, device),
            routes=None if self.routes is None else replace(self.routes, experts=move(self.routes.experts, device)),
            media=self.media.to(device),
            tokens={name: move(rows, device) for name, rows in self.tokens.items()},
        )


def local_microbatch(
    microbatch: Microbatch,
    cp: int = 1,
    cp_rank: int = 0,
    multiple: int = 1,
    tokens: Mapping[str, Tensor] | None = None,
    exchanges_heads: bool = False,
) -> LocalMicrobatch:
    """Returns the tokens of one context-parallel rank, the same number on every rank.

    Args:
        microbatch: the whole microbatch, on the host.
        cp, cp_rank: number of context-parallel ranks, and the rank in question.
        multiple: t is a multiple of this, and every attention call has `MIN_TOKENS` queries; a sequence of pads is
            appended if needed. Must be even for cp > 1.
        tokens: inputs [T, ...] by name, in addition to those of the microbatch.
        exchanges_heads: whether ranks exchange heads for attention, which then sees all tokens in order.
    """
    lengths = list(microbatch.lengths)
    chunks = 1 if cp == 1 else 2 * cp
    padded = [-(-length // chunks) * chunks for length in lengths]
    present = sum(padded) // cp
    missing = -(-max(present, MIN_TOKENS * chunks // cp) // multiple) * multiple - present
    if missing:
        lengths.append(0)
        padded.append(missing * cp)
    starts = np.cumsum([0, *padded])
    segment = np.repeat(np.arange(len(padded)), padded)  # for every padded token, its segment
    offset = np.arange(starts[-1]) - starts[segment]
    chunk = offset // (np.array(padded) // chunks)[segment]
    owner = np.minimum(chunk, chunks - 1 - chunk) if cp > 1 else np.zeros_like(chunk)
    own = np.flatnonzero(owner == cp_rank)
    gathered = np.empty_like(owner)  # for every padded token, its index among the tokens of all ranks
    gathered[np.argsort(owner, kind="stable")] = np.arange(len(owner))

    source = np.cumsum([0, *lengths])[segment] + offset
    is_token = offset < np.array(lengths)[segment]
    real = torch.from_numpy(is_token[own])
    counted = real & (not microbatch.is_empty)
    places = torch.from_numpy(np.where(is_token, source, 0)[own])
    return LocalMicrobatch(
        input_ids=torch.where(real, microbatch.input_ids[places], 0),
        position_ids=torch.from_numpy(offset[own]),
        targets=torch.where(real, microbatch.targets[places], IGNORED_TARGET),
        is_real=counted,
        is_routed=counted,
        calls=(_call(None, torch.from_numpy(gathered), padded, padded),)
        if exchanges_heads
        else _calls(padded, chunk, own, gathered, cp, cp_rank),
        image_call=_image_call(microbatch, is_token, own, gathered),
        restore=None if cp == 1 and not missing else torch.from_numpy(gathered[is_token]),
        num_tokens=len(own),
        lengths=tuple(microbatch.lengths),
        offsets=torch.from_numpy(offset[is_token]),
        routes=None if microbatch.routes is None else microbatch.routes.take(places, real),
        media=_media(microbatch, places, real),
        tokens=taken({**microbatch.tokens, **(tokens or {})}, places, real),
    )


def _media(microbatch: Microbatch, places: Tensor, real: Tensor) -> MediaTokens:
    """Returns the media tokens among a rank's tokens, which are at `places` of the microbatch unless `real` is
    False."""
    if not microbatch.media:
        return NO_MEDIA
    rows = torch.from_numpy(media_places(microbatch.media, microbatch.num_tokens))[places]
    own = (real & (rows >= 0)).nonzero()[:, 0]
    return MediaTokens(own, rows[own])


def _calls(
    padded: list[int], chunk: np.ndarray, own: np.ndarray, gathered: np.ndarray, cp: int, cp_rank: int
) -> tuple[AttentionCall, ...]:
    if cp == 1:
        return (_call(None, None, padded, padded),)
    sizes = [length // (2 * cp) for length in padded]
    return tuple(
        _call(
            torch.from_numpy(np.flatnonzero(chunk[own] == last)),
            torch.from_numpy(gathered[chunk <= last]),
            sizes,
            [size * (last + 1) for size in sizes],
        )
        for last in (cp_rank, 2 * cp - 1 - cp_rank)
    )


def _image_call(
    microbatch: Microbatch, is_token: np.ndarray, own: np.ndarray, gathered: np.ndarray
) -> AttentionCall | None:
    """Builds the call for this rank's image tokens that attend in both directions. Each segment is an image, with its
    sequence up to the end of the image as keys.

    A window extends back from a query's own position. If the image's last tokens are on another rank, filler queries
    stand in for them.

    Args:
        microbatch: the whole microbatch.
        is_token: for every padded token, False for pads.
        own: indices of this rank's tokens among the padded ones.
        gathered: for every padded token, its index among the tokens of all ranks.
    """
    images = [item for item in microbatch.media if item.bidirectional != "nowhere"]
    if not images:
        return None
    padded_place = np.flatnonzero(is_token)
    local = np.full(len(gathered), -1)
    local[own] = np.arange(len(own))
    starts = np.cumsum([0, *microbatch.lengths])
    queries, keys, counted = [], [], []
    query_lengths: list[int] = []
    key_lengths: list[int] = []
    for image in images:
        stop = image.start + image.num_tokens
        places = local[padded_place[image.start : stop]]
        mine = np.flatnonzero(places >= 0)
        if not len(mine):
            continue
        places = places[mine[0] :]
        start = starts[np.searchsorted(starts, image.start, side="right") - 1]
        counted.append(sum(query_lengths) + np.flatnonzero(places >= 0))
        queries.append(np.where(places >= 0, places, places[0]))
        keys.append(gathered[padded_place[start:stop]])
        query_lengths.append(len(places))
        key_lengths.append(stop - start)
    if not queries:
        return None
    all_queries, all_keys, outputs = (torch.from_numpy(np.concatenate(found)) for found in (queries, keys, counted))
    call = _call(all_queries, all_keys, query_lengths, key_lengths)
    counts = None if len(outputs) == len(all_queries) else outputs
    only = all(image.bidirectional == "in windows" for image in images)
    return replace(call, is_causal=False, only_windows=only, counted=counts)


def _call(
    queries: Tensor | None, keys: Tensor | None, query_lengths: list[int], key_lengths: list[int]
) -> AttentionCall:
    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)

    return AttentionCall(
        queries, keys, starts(query_lengths), starts(key_lengths), tuple(query_lengths), tuple(key_lengths)
    )
