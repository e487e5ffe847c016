"""Applies a function of whole matrices to shards: every matrix is put together on one rank, and cut again.

The ranks along the outer axis that cuts the matrices do as many matrices at once, one each. So no rank holds more than
one whole matrix, and nothing is computed twice. Shards travel there in one all-to-all and back in another.
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
"""A function of a matrix [m, n], or of a stack of matrices [k, m, n], that gives the same shape and dtype."""

GroupOf = Callable[[str], dist.ProcessGroup]
"""Gives the ranks along a mesh axis by its name: `Layout.group_of`. torch's meshes may return groups that are gone."""


def on_whole_matrices(
    work: Work,
    shard_of: Callable[[nn.Parameter], Tensor],
    parameters: Iterable[nn.Parameter],
    group_of: GroupOf,
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """This rank's shards of the results of a function of whole matrices. A collective of the parameters' ranks.

    Args:
        work: the function.
        shard_of: gives this rank's shard of the matrix that belongs to a parameter; all shards have one dtype.
        parameters: matrices and stacks of them, the same on all ranks and in the same order. Stacks are cut only
            between matrices, so each rank works on its own part of them.
        group_of: the groups of the parameters' layout.

    Returns:
        Every parameter and this rank's shard of its result, in any order.
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
        # The matrices of a batch are of about one size, for the ranks wait for each other.
        by_size = iter(sorted(members, key=lambda parameter: parameter.numel(), reverse=True))
        while batch := list(itertools.islice(by_size, size)):
            yield from zip(batch, _of_batch(work, [shard_of(p) for p in batch], batch, group_of), strict=True)


def _of_batch(work: Work, shards: list[Tensor], parameters: Sequence[Any], group_of: GroupOf) -> Iterator[Tensor]:
    """This rank's shards of the results of one batch. Rank i along the outer axis does the i-th matrix."""
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
    """The result for a matrix that is whole along the outer axis. Inner axes are gathered first and cut again."""
    for cut in reversed(inner):
        matrix = cut.gather(matrix, group_of(cut.axis))
    result = work(matrix)
    for cut in inner:
        result = result.narrow(cut.dim, cut.piece.start, cut.piece.stop - cut.piece.start)
    return result
