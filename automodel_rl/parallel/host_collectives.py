"""A step's few numbers and objects over ranks, on the host, by small gloo collectives."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.parallel.layout import Layout

T = TypeVar("T")


def from_last_stage(value: Any, layout: Layout) -> Any:
    """An object of the last stage, on every stage of its data rank; a guest keeps its own."""
    if layout.parallel.pp == 1 or layout.is_guest:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=layout.pp_control, group_src=layout.last_stage_rank)
    return box[0]


def tell_guests(value: T, layout: Layout) -> T:
    """An object that is equal on all ranks of the module, on its guests, too."""
    if layout.guests_control is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=layout.speaker, group=layout.guests_control)
    return box[0]


def tensor_from_last_stage(tensor: Tensor | None, layout: Layout) -> Tensor:
    """A tensor of the last stage, on every stage of its data rank and on that stage's device."""
    kind = from_last_stage(None if tensor is None else (tensor.shape, tensor.dtype), layout)
    if tensor is None:
        tensor = torch.empty(kind[0], dtype=kind[1], device=layout.device)
    if layout.parallel.pp > 1:
        dist.broadcast(tensor, group=layout.pp_group, group_src=layout.last_stage_rank)
    return tensor


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Every rank's object, rank 0's first."""
    gathered = [value] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def interleave(shares: Sequence[Sequence[T]]) -> list[T]:
    """What was dealt out as `items[rank :: num_ranks]`, in its order again."""
    return [shares[i % len(shares)][i // len(shares)] for i in range(sum(map(len, shares)))]


def any_rank(flags: Sequence[bool], layout: Layout) -> list[bool]:
    """For each flag whether it is set on any rank; the same answers on every rank."""
    votes = torch.tensor([int(flag) for flag in flags])
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=layout.world_control)
    return [bool(vote) for vote in votes.tolist()]
