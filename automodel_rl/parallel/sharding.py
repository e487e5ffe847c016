"""Sharded weights: the box of a whole tensor that a rank holds, and FSDP2 wrapping of a part."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from automodel_rl.compat.fsdp import drop_unsharded_gradients, reset_fsdp
from automodel_rl.parallel.collectives import all_gather
from automodel_rl.parallel.layout import Layout

Box = tuple[slice, ...]
"""A part of a tensor: start and end in every dim."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, differentiably; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(tensor: Tensor) -> Box:
    """Returns the part of the whole tensor that this rank holds.

    The inner axis (tp, ep) cuts first; FSDP then cuts along dim 0, as torch.chunk does.
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    return _box_at(tensor, _coordinate(tensor))


def overlap(one: Box, other: Box) -> Box | None:
    """Returns the intersection of two boxes; None if empty."""
    met = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return met if all(part.start < part.stop for part in met) else None


def relative(box: Box, outer: Box) -> Box:
    """Returns a box in the indices of an enclosing box."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def sharded_axes(tensor: Tensor) -> tuple[str, ...]:
    """Returns the mesh axes that cut a tensor, outer first; none if every rank holds the whole."""
    if not isinstance(tensor, DTensor):
        return ()
    placed = zip(_axis_names(tensor), tensor.placements, strict=True)
    return tuple(name for name, placement in placed if not placement.is_replicate())


def boxes_of_ranks(tensor: Tensor) -> list[Box]:
    """Returns the boxes that make up the whole tensor: one per rank along `sharded_axes`, the inner axis fastest."""
    if not isinstance(tensor, DTensor):
        return [local_box(tensor)]
    sizes = [
        1 if placement.is_replicate() else tensor.device_mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
    ]
    return [_box_at(tensor, coordinate) for coordinate in itertools.product(*map(range, sizes))]


def _box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """Returns the box of the rank at a coordinate of the tensor's mesh."""
    box = [slice(0, size) for size in tensor.shape]
    for axis in reversed(range(tensor.device_mesh.ndim)):
        placement: Any = tensor.placements[axis]
        if not placement.is_replicate():
            dim = placement.dim
            box[dim] = _chunk(box[dim], tensor.device_mesh.size(axis), coordinate[axis])
    return tuple(box)


def allocate_storage(parameter: nn.Parameter, device: torch.device) -> None:
    """Allocates a parameter on a device in place, since tied modules share it."""
    local = torch.empty_like(local_tensor(parameter.detach()), device=device)
    if isinstance(parameter, DTensor):
        local = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    torch.utils.swap_tensors(parameter, nn.Parameter(local, parameter.requires_grad))


@torch.no_grad()
def gather_whole(tensor: Tensor, layout: Layout) -> Tensor:
    """Returns the whole of a (sharded) tensor on all ranks of its mesh. A collective."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    whole = tensor.to_local()
    for cut in reversed(cuts_of(tensor)):
        whole = cut.gather(whole, layout.group_of(cut.axis))
    return whole.contiguous()


@dataclass(frozen=True)
class Cut:
    """One mesh axis along which a tensor is cut, as torch.chunk cuts.

    Attributes:
        size: size of this dim before the cut.
        count: number of ranks along the axis.
        index: this rank's index along the axis.
    """

    axis: str
    dim: int
    size: int
    count: int
    index: int

    @property
    def longest(self) -> int:
        """Size of the first and largest piece."""
        return -(-self.size // self.count)

    @property
    def piece(self) -> slice:
        """The slice of the dim that this rank holds."""
        return _chunk(slice(0, self.size), self.count, self.index)

    def padded(self, tensor: Tensor, length: int) -> Tensor:
        """Returns a piece with the cut dim moved to the front and zero-padded to a length."""
        own = tensor.movedim(self.dim, 0)
        return torch.cat([own, own.new_zeros(length - len(own), *own.shape[1:])])

    def joined(self, pieces: Tensor) -> Tensor:
        """Returns the tensor that is whole along the dim, from the concatenated padded pieces of all ranks."""
        return pieces[: self.size].movedim(0, self.dim)

    def gather(self, piece: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Joins the pieces of all ranks along the axis. A collective of these ranks."""
        return self.joined(all_gather(self.padded(piece, self.longest), group))


def cuts_of(tensor: DTensor) -> list[Cut]:
    """Returns the cuts of a tensor in the order in which they apply: the inner axis first."""
    mesh, sizes, coordinate = tensor.device_mesh, list(tensor.shape), _coordinate(tensor)
    cuts = []
    for axis in reversed(range(mesh.ndim)):
        placement: Any = tensor.placements[axis]
        if not placement.is_replicate():
            dim = placement.dim
            cuts.append(Cut(_axis_names(tensor)[axis], dim, sizes[dim], mesh.size(axis), coordinate[axis]))
            sizes[dim] = cuts[-1].piece.stop - cuts[-1].piece.start
    return cuts


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups parameters by mesh: torch's foreach kernels accept only one mesh at a time."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def num_shards(tensor: Tensor) -> int:
    """Returns the number of ranks over which a tensor is cut; 1 if replicated."""
    shards = 1
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            shards *= 1 if placement.is_replicate() else tensor.device_mesh.size(axis)
    return shards


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Replaces a parameter by a DTensor cut along `dim` over a one-axis mesh. Neither has storage."""
    parameter = dict(module.named_parameters(recurse=False)).get(name)
    if parameter is None or isinstance(parameter, DTensor):  # no bias, or shared with an earlier module
        return
    shape = list(parameter.shape)
    assert shape[dim] % mesh.size() == 0, f"{name} {shape} over {mesh.size()}"  # the support table has rejected others
    shape[dim] //= mesh.size()
    local = torch.empty(shape, dtype=parameter.dtype, device="meta")
    whole = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


@dataclass(frozen=True)
class Unit:
    """Modules whose weights FSDP gathers together.

    Attributes:
        module: the module; units inside of it come first.
        mesh: the mesh that shards its weights and, with replicas, copies them.
        is_first: whether its backward does not need its weights, as an embedding's.
        is_last: whether its backward directly follows its forward, so that weights stay gathered in between.
    """

    module: nn.Module
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    is_first: bool = False
    is_last: bool = False


def wrap_fsdp(units: Iterable[Unit], *, reshards: bool) -> None:
    """Makes FSDP units of modules. The last one is the part, with the remaining weights.

    Frozen weights held by a single rank are skipped: FSDP would copy them to gather. Gradients are summed, not
    averaged: losses are divided by global counts before the backward.

    Args:
        reshards: whether a unit frees its gathered weights after its forward. Otherwise they stay gathered over a
            step's microbatches: one all-gather per step instead of two per microbatch.
    """
    for unit in units:
        whole: set[nn.Parameter] = set()
        if unit.mesh.size(unit.mesh.ndim - 1) == 1:
            whole = {parameter for parameter in unit.module.parameters() if not parameter.requires_grad}
        fully_shard(
            unit.module,
            mesh=unit.mesh,
            mp_policy=unit.policy,
            reshard_after_forward=reshards and not unit.is_last,
            ignored_params=whole,
        )
        if unit.is_first:
            cast(FSDPModule, unit.module).set_unshard_in_backward(False)
    sum_fsdp_gradients(unit.module)


def sum_fsdp_gradients(part: nn.Module) -> None:
    """Makes a part's FSDP units sum gradients instead of averaging them."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def begin_backward(part: Any, is_last: bool, *, reduces: bool, reshards: bool) -> None:
    """Prepares the next backward of a part.

    Args:
        is_last: whether it is a step's last backward, which always reduces and reshards.
        reduces: whether the backward reduces gradients over the ranks that share weights, adding them to the shards'
            sums. Otherwise they accumulate on each rank. Replicas of shards are reduced in the last backward only.
        reshards: whether each unit frees its gathered weights after its backward.
    """
    part.set_requires_gradient_sync(is_last or reduces)
    part.set_requires_all_reduce(is_last)
    part.set_reshard_after_backward(is_last or reshards)
    part.set_is_last_backward(is_last)


def release_gathered(part: nn.Module) -> None:
    """Frees weights gathered by a forward without backward. They would be stale once the next optimizer step changes
    the shards."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def abandon_step(part: Any) -> None:
    """Resets a part's FSDP units after a step that failed midway. Otherwise they would keep gathered weights whose
    memory is freed, and the next step would add to this one's gradients."""
    begin_backward(part, is_last=True, reduces=True, reshards=True)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            drop_unsharded_gradients(module)
    reset_fsdp(part)
    part.zero_grad(set_to_none=True)


def _axis_names(tensor: DTensor) -> tuple[str, ...]:
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None  # set on all our meshes
    return names


def _coordinate(tensor: DTensor) -> list[int]:
    """Returns this rank's coordinate on a tensor's mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # a rank only has tensors of its own meshes
    return list(coordinate)


def _chunk(whole: slice, count: int, index: int) -> slice:
    size = -(-(whole.stop - whole.start) // count)
    start = min(whole.start + index * size, whole.stop)
    return slice(start, min(start + size, whole.stop))
