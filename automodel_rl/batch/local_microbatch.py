"""What one rank computes of a microbatch: its tokens, and which keys its queries see.

Context parallelism cuts every sequence into 2 * cp chunks, padded to equal length; rank r has chunks r and
2 * cp - 1 - r of every sequence, which evens out causal attention (as for Llama 3, arXiv:2407.21783, section 3.3.2).
Its queries meet the keys of all ranks, gathered, in two calls: its front chunks see the chunks up to r, its back chunks
those up to 2 * cp - 1 - r.

Shape letters: T tokens of the microbatch, t tokens of one rank, N sequences.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from automodel_rl.batch.images import NO_IMAGES, ImageTokens, image_places
from automodel_rl.batch.microbatch import IGNORED_TARGET, Microbatch
from automodel_rl.batch.move import move
from automodel_rl.batch.routes import Routes


@dataclass(frozen=True)
class AttentionCall:
    """One causal attention of ragged queries over ragged keys, aligned at the bottom right.

    The last query of a segment sees all of its keys, the one before all but the last, and so on.

    Attributes:
        queries: places of the queries among this rank's tokens, int64; None for all of them, in order.
        keys: places of the keys in the tokens of all ranks, rank 0's first, int64; None for all of this rank's own.
        cu_queries, cu_keys: where segments start, and the total, int32 [N + 1].
        query_lengths, key_lengths: tokens of every segment; on the host.
    """

    queries: Tensor | None
    keys: Tensor | None
    cu_queries: Tensor
    cu_keys: Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]

    @property
    def longest_query(self) -> int:
        return max(self.query_lengths)

    @property
    def longest_key(self) -> int:
        return max(self.key_lengths)

    def to(self, device: torch.device) -> "AttentionCall":
        return replace(
            self,
            queries=None if self.queries is None else move(self.queries, device),
            keys=None if self.keys is None else move(self.keys, device),
            cu_queries=move(self.cu_queries, device),
            cu_keys=move(self.cu_keys, device),
        )


@dataclass(eq=False)  # not frozen: of what it is handed, torch.compile reads the fields of frozen dataclasses
class LocalMicrobatch:
    """One rank's tokens of a microbatch, which nobody changes. A dataclass is a single leaf to pytree, so schedules
    pass it on untouched, and compiled layers hand it to their attention without a look: microbatches have any number of
    sequences.

    Attributes:
        input_ids, position_ids, targets: int64 [t]; pads have token 0 and no target.
        is_real: False for pads and for the tokens of an empty microbatch, bool [t].
        calls: how attention runs.
        restore: for every token of the microbatch its place in the tokens of all ranks, rank 0's first, int64 [T]; None
            where this rank has the microbatch as it is.
        num_tokens: t.
        routes: experts that its tokens are to go to, missing for pads; None, and routers choose by themselves.
        images: image tokens among them.
        rotary_positions: in time, height and width, int64 [3, t], for a model that turns by them; pads have 0.
        index: its place among the microbatches of a step.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    is_real: Tensor
    calls: tuple[AttentionCall, ...]
    restore: Tensor | None
    num_tokens: int
    routes: Routes | None = None
    images: ImageTokens = NO_IMAGES
    rotary_positions: Tensor | None = None
    index: int = 0

    def to(self, device: torch.device) -> "LocalMicrobatch":
        """The same on `device`."""
        return replace(
            self,
            input_ids=move(self.input_ids, device),
            position_ids=move(self.position_ids, device),
            targets=move(self.targets, device),
            is_real=move(self.is_real, device),
            calls=tuple(call.to(device) for call in self.calls),
            restore=None if self.restore is None else move(self.restore, device),
            routes=None if self.routes is None else replace(self.routes, experts=move(self.routes.experts, device)),
            images=self.images.to(device),
            rotary_positions=None if self.rotary_positions is None else move(self.rotary_positions, device),
        )


def local_microbatch(
    microbatch: Microbatch, cp: int = 1, cp_rank: int = 0, multiple: int = 1, rotary_positions: Tensor | None = None
) -> LocalMicrobatch:
    """The tokens of one context-parallel rank, as many on every rank.

    Args:
        microbatch: the whole microbatch, on the host.
        cp, cp_rank: over how many ranks it is cut, and whose part is returned.
        multiple: t is a multiple of this; a sequence of pads at the end makes up for what is missing. Even for cp > 1.
        rotary_positions: of the microbatch, where they are not `position_ids`.
    """
    lengths = list(microbatch.lengths)
    chunks = 1 if cp == 1 else 2 * cp
    padded = [-(-length // chunks) * chunks for length in lengths]
    missing = -(sum(padded) // cp) % multiple
    if missing:
        lengths.append(0)
        padded.append(missing * cp)
    starts = np.cumsum([0, *padded])
    segment = np.repeat(np.arange(len(padded)), padded)  # of every padded token
    offset = np.arange(starts[-1]) - starts[segment]
    chunk = offset // (np.array(padded) // chunks)[segment]
    owner = np.minimum(chunk, chunks - 1 - chunk) if cp > 1 else np.zeros_like(chunk)
    own = np.flatnonzero(owner == cp_rank)
    gathered = np.empty_like(owner)  # of every padded token, its place in the tokens of all ranks
    gathered[np.argsort(owner, kind="stable")] = np.arange(len(owner))

    source = np.cumsum([0, *lengths])[segment] + offset
    is_token = offset < np.array(lengths)[segment]
    real = torch.from_numpy(is_token[own])
    places = torch.from_numpy(np.where(is_token, source, 0)[own])
    return LocalMicrobatch(
        input_ids=torch.where(real, microbatch.input_ids[places], 0),
        position_ids=torch.from_numpy(offset[own]),
        targets=torch.where(real, microbatch.targets[places], IGNORED_TARGET),
        is_real=real & (not microbatch.is_empty),
        calls=_calls(padded, chunk, own, gathered, cp, cp_rank),
        restore=None if cp == 1 and not missing else torch.from_numpy(gathered[is_token]),
        num_tokens=len(own),
        routes=None if microbatch.routes is None else microbatch.routes.take(places, real),
        images=_images(microbatch, places, real),
        rotary_positions=None if rotary_positions is None else rotary_positions[:, places] * real,
    )


def _images(microbatch: Microbatch, places: Tensor, real: Tensor) -> ImageTokens:
    """The image tokens among those that a rank has of a microbatch, by their places in it."""
    if not microbatch.images:
        return NO_IMAGES
    microbatches = torch.from_numpy(image_places(microbatch.images, microbatch.num_tokens))[places]
    own = (real & (microbatches >= 0)).nonzero()[:, 0]
    return ImageTokens(own, microbatches[own])


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


def _call(
    queries: Tensor | None, keys: Tensor | None, query_lengths: list[int], key_lengths: list[int]
) -> AttentionCall:
    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)

    return AttentionCall(
        queries, keys, starts(query_lengths), starts(key_lengths), tuple(query_lengths), tuple(key_lengths)
    )
