"""The mesh of a job and the process groups that belong to it."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed import ParallelismSizes
from nemo_automodel.components.distributed.config import FSDP2Config
from nemo_automodel.components.distributed.mesh import MeshContext
from torch.distributed.device_mesh import DeviceMesh

from automodel_rl.config import ParallelConfig
from automodel_rl.parallel.schedules import SCHEDULES

PP_AXIS = "pp"


@dataclass(frozen=True)
class Layout:
    """This rank's place among all ranks.

    The `control` groups are gloo groups for a few host numbers and objects, on every device: small, exact in float64,
    and never queued behind the device's work.

    Attributes:
        parallel: the sizes.
        device: where this rank computes.
        mesh: nemo_automodel's mesh, axes (pp, dp_replicate, dp_shard, cp, tp).
        world_control: all ranks.
        data_control: the data ranks of this rank's stage.
        pp_control: the pipeline ranks of this rank's data rank, the one with the first stage first.
        ends_group: the ranks with first and last stage of this rank's data rank, None elsewhere; for tied embeddings.
    """

    parallel: ParallelConfig
    device: torch.device
    mesh: MeshContext
    world_control: dist.ProcessGroup
    data_control: dist.ProcessGroup
    pp_control: dist.ProcessGroup
    ends_group: dist.ProcessGroup | None

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.mesh.device_mesh

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.device_mesh[PP_AXIS].get_group()

    @property
    def pp_rank(self) -> int:
        return dist.get_rank(self.pp_control)

    @property
    def data_rank(self) -> int:
        return dist.get_rank(self.data_control)

    @property
    def last_stage_rank(self) -> int:
        """The rank with the last stage, in the groups over stages."""
        return 0 if SCHEDULES[self.parallel.schedule].is_v else self.parallel.pp - 1

    @property
    def has_last_stage(self) -> bool:
        return self.pp_rank == self.last_stage_rank

    @property
    def ranks_per_stage(self) -> int:
        return dist.get_world_size() // self.parallel.pp


def build_layout(parallel: ParallelConfig, strategy: FSDP2Config, device: torch.device) -> Layout:
    """Builds mesh and groups. A collective: every rank of the job calls it with the same sizes."""
    sizes = ParallelismSizes(
        pp_size=parallel.pp,
        tp_size=parallel.tp,
        cp_size=parallel.cp,
        dp_size=parallel.num_data_ranks,
        dp_replicate_size=parallel.dp_replicate,
    )
    mesh = MeshContext.build(strategy, parallelism_sizes=sizes, world_size=dist.get_world_size())
    ranks = mesh.device_mesh.mesh.reshape(parallel.pp, parallel.num_data_ranks, -1)  # [pp, data, cp * tp]
    by_data = ranks.permute(0, 2, 1).flatten(0, 1).tolist()
    by_stage = ranks.permute(1, 2, 0).flatten(0, 1).tolist()
    last = 0 if SCHEDULES[parallel.schedule].is_v else -1
    return Layout(
        parallel=parallel,
        device=device,
        mesh=mesh,
        world_control=_control_group([list(range(dist.get_world_size()))]),
        data_control=_control_group(by_data),
        pp_control=_control_group(by_stage),
        ends_group=_own_group([sorted({ranks_[0], ranks_[last]}) for ranks_ in by_stage]),
    )


def _control_group(groups: list[list[int]]) -> dist.ProcessGroup:
    group = _own_group(groups, "gloo")
    assert group is not None  # these groups cover all ranks
    return group


def _own_group(groups: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """Creates every group, as every rank must, and returns the one that holds this rank (None if no group does)."""
    own = None
    for members in groups:
        group = dist.new_group(members, backend=backend)
        if dist.get_rank() in members:
            own = group
    return own
