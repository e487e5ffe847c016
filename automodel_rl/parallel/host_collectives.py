"""Small gloo collectives on the host, for the few numbers and objects of a step."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.parallel.layout import Layout

T = TypeVar("T")


def from_last_stage(value: Any, layout: Layout) -> Any:
    """The object of the last stage, on every stage of its data rank. An outsider keeps its own."""
    if layout.parallel.pp == 1 or layout.is_outsider:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=layout.pp_control, group_src=layout.last_stage_rank)
    return box[0]


def share_with_outsiders(value: T, layout: Layout) -> T:
    """The object that all ranks of the component have, on its outsiders, too. What outsiders give is not read."""
    if layout.outsiders_control is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=layout.outsiders_leader, group=layout.outsiders_control)
    return box[0]


def tensor_from_last_stage(tensor: Tensor | None, layout: Layout) -> Tensor:
    """The tensor of the last stage, on every stage of its data rank and on that stage's device."""
    kind = from_last_stage(None if tensor is None else (tensor.shape, tensor.dtype), layout)
    if tensor is None:
        tensor = torch.empty(kind[0], dtype=kind[1], device=layout.device)
    if layout.parallel.pp > 1:
        dist.broadcast(tensor, group=layout.pp_group, group_src=layout.last_stage_rank)
    return tensor


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """The objects of all ranks, rank 0's first."""
    gathered = [value] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def combine(tensor: Tensor, group: dist.ProcessGroup, how: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
    """Combines a small tensor on the host over the ranks of a gloo group, in place, for all of them. A collective.

    Numbers go up and down a binomial tree: 2 log2(n) messages lie one behind the other, and a rank talks to log2(n)
    others at most. gloo's own sums go around a ring of all ranks, with 2 (n - 1) messages.

    Args:
        tensor: contiguous, of one shape and dtype on all ranks.
        group: the group.
        how: combines the numbers of two ranks; in the order of ranks.
    """
    rank, size, reach = group.rank(), group.size(), 1
    while reach < size and not rank & reach:
        if rank + reach < size:
            other = torch.empty_like(tensor)
            dist.recv(other, group=group, group_src=rank + reach)
            tensor.copy_(how(tensor, other))
        reach *= 2
    if rank:
        dist.send(tensor, group=group, group_dst=rank - reach)
    if size > 1:
        dist.broadcast(tensor, group=group, group_src=0)


def gather_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The numbers of all ranks of a gloo group, [n, k], rank 0's first. A collective.

    Args:
        own: this rank's numbers on the host, [k]; as many on all ranks.
        group: the group.
    """
    rows = own.new_zeros(group.size(), len(own))
    rows[group.rank()] = own
    combine(rows, group)  # all but one rank have zeros in a row
    return rows


def any_rank(flags: Sequence[bool], layout: Layout) -> list[bool]:
    """Whether each flag is set on any rank; the same answers on every rank."""
    votes = torch.tensor([int(flag) for flag in flags])
    combine(votes, layout.world_control, torch.maximum)
    return [bool(vote) for vote in votes.tolist()]
