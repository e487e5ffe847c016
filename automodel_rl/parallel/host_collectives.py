"""Small gloo collectives on the host, for a step's few numbers and objects."""

import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.parallel.layout import Layout

T = TypeVar("T")


def broadcast_from_last_stage(value: Any, layout: Layout) -> Any:
    """Returns the last stage's object on every stage of its data rank. An outsider keeps its own."""
    if layout.parallel.pp == 1 or layout.is_outsider:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=layout.pp_control, group_src=layout.last_stage_rank)
    return box[0]


def broadcast_to_outsiders(value: T, layout: Layout) -> T:
    """Sends the object shared by the component's ranks to its outsiders, whose own is ignored."""
    if layout.outsiders_control is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=layout.outsiders_leader, group=layout.outsiders_control)
    return box[0]


def tensor_from_last_stage(tensor: Tensor | None, layout: Layout) -> Tensor:
    """Returns the last stage's tensor on every stage of its data rank, on that stage's device."""
    kind = broadcast_from_last_stage(None if tensor is None else (tensor.shape, tensor.dtype), layout)
    if tensor is None:
        tensor = torch.empty(kind[0], dtype=kind[1], device=layout.device)
    if layout.parallel.pp > 1:
        dist.broadcast(tensor, group=layout.pp_group, group_src=layout.last_stage_rank)
    return tensor


@dataclass(frozen=True)
class TreeNode:
    """A rank's node in a binomial tree of a group's ranks. The subtree of a child holds the ranks from it up to the
    next child.

    Attributes:
        children: the ranks that send to this one, smallest subtree first.
        parent: the rank that it sends to; None for rank 0.
        end: one past the last rank of this subtree.
    """

    children: tuple[int, ...]
    parent: int | None
    end: int

    @classmethod
    def of(cls, rank: int, size: int) -> "TreeNode":
        reach, children = 1, []
        while reach < size and not rank & reach:
            children += [rank + reach] if rank + reach < size else []
            reach *= 2
        return cls(tuple(children), rank - reach if rank else None, min(rank + reach, size))

    @property
    def branches(self) -> list[tuple[int, int]]:
        """Each child, and one past the last rank of its subtree."""
        return [*zip(self.children, (*self.children[1:], self.end), strict=False)]


def combine(tensor: Tensor, group: dist.ProcessGroup, how: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
    """Combines a small, contiguous host tensor over a gloo group in place, on all of its ranks. A collective.

    Numbers go up and down a binomial tree: 2 log2(n) successive messages, and at most log2(n) peers per rank. gloo's
    own sums take 2 (n - 1) messages around a ring. `how` combines two ranks' numbers, in the order of ranks.
    """
    place = TreeNode.of(group.rank(), group.size())
    for child in place.children:
        other = torch.empty_like(tensor)
        dist.recv(other, group=group, group_src=child)
        tensor.copy_(how(tensor, other))
    _hand_on(tensor, tensor, place, group)


def gather_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers host numbers [k] of all ranks of a gloo group to [n, k], rank 0's first. A collective along the same
    tree."""
    lengths = [len(own)] * group.size()
    return _gather(own, lengths, group).view(group.size(), len(own))


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Gathers picklable objects (tensors on the host) of all ranks of a gloo group, rank 0's first. A collective
    along the same tree."""
    return [_unpickled(piece) for piece in gather_pieces(_pickled(value), group)]


def gather_pieces(own: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Gathers bytes, uint8 [k] on the host, of all ranks of a gloo group, rank 0's first; k may differ. A collective
    along the same tree."""
    lengths = gather_rows(torch.tensor([len(own)]), group).flatten().tolist()
    return _gather(own, lengths, group).split(lengths)


def gather_to_first(value: T, group: dist.ProcessGroup) -> list[T] | None:
    """Gathers picklable objects on rank 0 of a gloo group, for data too large for all ranks; the others get None. A
    collective along the same tree."""
    rank, place = group.rank(), TreeNode.of(group.rank(), group.size())
    pieces = [_pickled(value)]
    for child, end in place.branches:
        pieces += _receive(end - child, child, group)
    if place.parent is not None:
        _send(pieces, place.parent, group)
        return None
    assert rank == 0
    return [_unpickled(piece) for piece in pieces]


def scatter_from_first(values: Sequence[T] | None, group: dist.ProcessGroup) -> T:
    """Returns this rank's element of rank 0's `values`, one picklable object per rank (None on other ranks). A
    collective along the same tree."""
    rank, place = group.rank(), TreeNode.of(group.rank(), group.size())
    if place.parent is None:
        assert values is not None
        pieces = [_pickled(value) for value in values]
    else:
        pieces = _receive(place.end - rank, place.parent, group)
    for child, end in place.branches:
        _send(pieces[child - rank : end - rank], child, group)
    own: T = _unpickled(pieces[0])
    return own


def _send(pieces: Sequence[Tensor], to: int, group: dist.ProcessGroup) -> None:
    dist.send(torch.tensor([len(piece) for piece in pieces]), group=group, group_dst=to)
    dist.send(torch.cat([*pieces]), group=group, group_dst=to)


def _receive(count: int, source: int, group: dist.ProcessGroup) -> list[Tensor]:
    lengths = torch.empty(count, dtype=torch.int64)
    dist.recv(lengths, group=group, group_src=source)
    whole = torch.empty(int(lengths.sum()), dtype=torch.uint8)
    dist.recv(whole, group=group, group_src=source)
    return [*whole.split(lengths.tolist())]


def _unpickled(piece: Tensor) -> Any:
    return pickle.loads(piece.numpy().tobytes())


def _pickled(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _gather(own: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Concatenates all ranks' tensors, whose lengths every rank knows."""
    rank, place = group.rank(), TreeNode.of(group.rank(), group.size())
    starts = [0, *itertools.accumulate(lengths)]
    whole = own.new_empty(starts[-1])
    whole[starts[rank] : starts[rank + 1]] = own
    for child, end in place.branches:
        dist.recv(whole[starts[child] : starts[end]], group=group, group_src=child)
    _hand_on(whole[starts[rank] : starts[place.end]], whole, place, group)
    return whole


def _hand_on(mine: Tensor, whole: Tensor, place: TreeNode, group: dist.ProcessGroup) -> None:
    """Sends this subtree's data up the tree, and receives the whole back."""
    if place.parent is not None:
        dist.send(mine, group=group, group_dst=place.parent)
    if group.size() > 1:
        dist.broadcast(whole, group=group, group_src=0)


def any_rank(flags: Sequence[bool], layout: Layout) -> list[bool]:
    """Returns whether each flag is set on any rank; the same on every rank."""
    votes = torch.tensor([int(flag) for flag in flags])
    combine(votes, layout.world_control, torch.maximum)
    return [bool(vote) for vote in votes.tolist()]
