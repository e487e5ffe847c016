"""Small gloo collectives on the host, for the few numbers and objects of a step."""

from collections.abc import Sequence
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


def any_rank(flags: Sequence[bool], layout: Layout) -> list[bool]:
    """Whether each flag is set on any rank; the same answers on every rank."""
    votes = torch.tensor([int(flag) for flag in flags])
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=layout.world_control)
    return [bool(vote) for vote in votes.tolist()]
