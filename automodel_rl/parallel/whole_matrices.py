"""Applies a function of whole matrices to sharded ones: each matrix is assembled on one rank and cut again.

The ranks along the outer sharded axis process as many matrices at once, one each, so no rank holds more than one
whole matrix, and nothing is computed twice. Shards are exchanged in one all-to-all each way.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_rl.parallel.collectives import all_to_all
from automodel_rl.parallel.sharding import Cut, cuts_of

Work = Callable[[Tensor], Tensor]
"""A function of a matrix [m, n], or of a stack of matrices [k, m, n], that preserves shape and dtype."""

GroupOf = Callable[[str], dist.ProcessGroup]
"""Returns the ranks along a named mesh axis, as `Layout.group_of`. torch's meshes may return destroyed groups."""


def on_whole_matrices(
    work: Work,
    shard_of: Callable[[nn.Parameter], Tensor],
    parameters: Iterable[nn.Parameter],
    group_of: GroupOf,
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields every parameter, in any order, with this rank's shard of the function's result. A collective of the
    parameters' ranks.

    Args:
        shard_of: returns this rank's shard of a parameter's matrix; all shards have the same dtype.
        parameters: matrices and stacks, the same on all ranks in the same order. Stacks are sharded only between
            matrices, so each rank processes its own.
    """
    split: dict[str, list[nn.Parameter]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.ndim == 2:
            split.setdefault(cuts_of(parameter)[-1].axis, []).append(parameter)
            continue
        assert not isinstance(parameter, DTensor) or all(cut.dim == 0 for cut in cuts_of(parameter))
        shard = shard_of(parameter)
        yield parameter, work(shard) if shard.numel() else shard
    for axis, members in split.items():
        size = group_of(axis).size()
        # Batches of similar sizes, since the ranks wait for each other.
        by_size = iter(sorted(members, key=lambda parameter: parameter.numel(), reverse=True))
        while batch := list(itertools.islice(by_size, size)):
            yield from zip(batch, _of_batch(work, [shard_of(p) for p in batch], batch, group_of), strict=True)


def _of_batch(work: Work, shards: list[Tensor], parameters: Sequence[Any], group_of: GroupOf) -> Iterator[Tensor]:
    """Yields this rank's shards of a batch's results. Rank i along the outer axis processes the i-th matrix."""
    outer = [cuts_of(parameter)[-1] for parameter in parameters]
    group = group_of(outer[0].axis)
    rank, nobody = group.rank(), [0] * (group.size() - len(parameters))
    padded = [cut.padded(shard, cut.longest) for cut, shard in zip(outer, shards, strict=True)]
    sizes = [piece.numel() for piece in padded]
    is_owner = rank < len(parameters)
    own = [sizes[rank] if is_owner else 0] * group.size()
    pieces = all_to_all(torch.cat([piece.flatten() for piece in padded]), [*sizes, *nobody], own, group)
    if is_owner:
        stacked = pieces.view(-1, *padded[rank].shape[1:])
        result = _whole(work, outer[rank].joined(stacked), cuts_of(parameters[rank])[:-1], group_of)
        pieces = outer[rank].padded(result, len(stacked)).flatten()
    returned = all_to_all(pieces, own, [*sizes, *nobody], group)
    for cut, piece, flat in zip(outer, padded, returned.split([*sizes, *nobody])[: len(sizes)], strict=True):
        length = cut.piece.stop - cut.piece.start
        yield flat.view_as(piece)[:length].movedim(0, cut.dim)


def _whole(work: Work, matrix: Tensor, inner: list[Cut], group_of: GroupOf) -> Tensor:
    """Processes a matrix that is whole along the outer axis: gathers the inner axes first and cuts them again."""
    for cut in reversed(inner):
        matrix = cut.gather(matrix, group_of(cut.axis))
    result = work(matrix)
    for cut in inner:
        result = result.narrow(cut.dim, cut.piece.start, cut.piece.stop - cut.piece.start)
    return result
