"""Meshes of a component and their process groups.

A model of one component has one layout, over all ranks of the job. In a multimodal model each component has its own,
over the same ranks or others.

Every rank has every layout; outside of a component it is an outsider of its layout. An outsider of the language model
has neither parts nor microbatches, but joins the collectives of the whole job, and receives each step's results from
a leader.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from automodel_rl.batch import DataShare
from automodel_rl.compat.process_groups import set_timeouts
from automodel_rl.config import ParallelConfig
from automodel_rl.config.components import ComponentsConfig, one_layout
from automodel_rl.launch.process_group import longest_wait
from automodel_rl.parallel.pipeline.schedules import SCHEDULES

DENSE_AXES = ("pp", "dp_replicate", "fsdp", "tp")
"""Mesh axes of most parameters. `fsdp` is dp_shard x cp: context-parallel ranks shard weights, too."""

EXPERT_AXES = ("pp", "dp_replicate", "ep_shard", "ep")
"""Mesh axes of expert weights, over the same ranks: ep_shard x ep is fsdp x tp."""

MESSAGES = ("activation", "gradient")
"""Kinds of messages between pipeline stages."""


@dataclass(frozen=True)
class Layout:
    """This rank's place among the ranks of a component. An outsider has the layout, too.

    The `control` groups are gloo groups on every device, for a few numbers and objects on the host. They are exact in
    float64 and never queued behind the device's work.

    Attributes:
        mesh: the mesh with `DENSE_AXES`.
        expert_mesh: the mesh with `EXPERT_AXES`; None without expert parallelism.
        cp_group: the ranks that share a microbatch; None without context parallelism.
        world_control: all ranks of the job, including outsiders.
        stage_control: all ranks of this rank's stages.
        data_control: the data ranks of this rank's stage.
        pp_control: the pipeline ranks of this rank's data rank, first stage first.
        ends_group: for tied embeddings, this data rank's ranks with the first and the last stage; None elsewhere.
        message_groups: the pipeline ranks, once per kind in `MESSAGES` and parity of the sender's rank; empty with
            one stage per rank.
        outsiders_control: all outsiders and `outsiders_leader`; None on other ranks, or without outsiders.
        outsiders_leader: the job's rank that sends results to outsiders; it has the last stage.
        is_outsider: whether this rank is an outsider. Its groups over stages and data ranks then hold only itself.
    """

    parallel: ParallelConfig
    device: torch.device
    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None
    cp_group: dist.ProcessGroup | None
    world_control: dist.ProcessGroup
    stage_control: dist.ProcessGroup
    data_control: dist.ProcessGroup
    pp_control: dist.ProcessGroup
    ends_group: dist.ProcessGroup | None
    message_groups: dict[tuple[str, int], dist.ProcessGroup]
    outsiders_control: dist.ProcessGroup | None = None
    outsiders_leader: int = 0
    is_outsider: bool = False

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh over which most parameters are sharded and, with replicas, copied."""
        return self.mesh["dp_replicate", "fsdp"] if self.parallel.dp_replicate > 1 else self.mesh["fsdp"]

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """The mesh that shards expert weights besides ep."""
        if self.expert_mesh is None:
            return self.fsdp_mesh
        names = ("dp_replicate", "ep_shard") if self.parallel.dp_replicate > 1 else "ep_shard"
        return self.expert_mesh[names]

    def group_of(self, axis: str) -> dist.ProcessGroup:
        """Returns the ranks along one of `DENSE_AXES` or `EXPERT_AXES`."""
        if axis in DENSE_AXES:
            return self.mesh.get_group(axis)
        assert self.expert_mesh is not None
        return self.expert_mesh.get_group(axis)

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.mesh["pp"].get_group()

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that split each layer; None without tensor parallelism."""
        return self.mesh["tp"].get_group() if self.parallel.tp > 1 and not self.is_outsider else None

    @property
    def pp_rank(self) -> int:
        return dist.get_rank(self.pp_control)

    @property
    def data_rank(self) -> int:
        return dist.get_rank(self.data_control)

    @property
    def data_share(self) -> DataShare:
        """This rank's share of every global batch."""
        return DataShare(self.data_rank, self.parallel.num_data_ranks)

    @property
    def cp_rank(self) -> int:
        return 0 if self.cp_group is None else dist.get_rank(self.cp_group)

    @property
    def tp_rank(self) -> int:
        return 0 if self.tp_group is None else dist.get_rank(self.tp_group)

    @property
    def writes_for_stage(self) -> bool:
        """Whether this rank is the one that writes for its stage."""
        return not self.is_outsider and self.data_rank == 0 and self.cp_rank == 0 and self.tp_rank == 0

    @property
    def is_first_of_data_rank(self) -> bool:
        """Whether this rank is the one that writes for its data rank."""
        return not self.is_outsider and self.pp_rank == 0 and self.cp_rank == 0 and self.tp_rank == 0

    @property
    def last_stage_rank(self) -> int:
        """Index of the rank with the last stage in groups over stages."""
        return 0 if SCHEDULES[self.parallel.schedule].is_v else self.parallel.pp - 1

    @property
    def has_last_stage(self) -> bool:
        return not self.is_outsider and self.pp_rank == self.last_stage_rank

    @property
    def has_first_stage(self) -> bool:
        return not self.is_outsider and self.pp_rank == 0

    @property
    def ranks_per_stage(self) -> int:
        return self.parallel.world_size // self.parallel.pp

    def close(self) -> None:
        """Destroys this layout's process groups, but not the job's own. A collective of the job."""
        meshes = [] if self.is_outsider else [self.mesh] + ([self.expert_mesh] if self.expert_mesh else [])
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        groups += [self.world_control, self.stage_control, self.data_control, self.pp_control]
        groups += [group for group in (self.cp_group, self.ends_group, self.outsiders_control) if group is not None]
        groups += self.message_groups.values()
        for group in dict.fromkeys(groups):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


@dataclass(frozen=True)
class Meshes:
    """The layouts of a model's components.

    Attributes:
        language: the language model's layout; this rank may be an outsider there.
        encoders: by name; empty for text models.
        components: ranks and sizes per component; None for a model of one component.
    """

    language: Layout
    encoders: dict[str, Layout] = field(default_factory=dict)
    components: ComponentsConfig | None = None

    def close(self) -> None:
        """Destroys the process groups of all layouts. A collective of the job."""
        for layout in (self.language, *self.encoders.values()):
            layout.close()


def build_meshes(
    parallel: ParallelConfig, components: ComponentsConfig | None, device: torch.device, encoders: Sequence[str]
) -> Meshes:
    """Builds the layouts of all components. A collective: every rank of the job calls it with the same sizes."""
    if not encoders:
        return Meshes(build_layout(parallel, device))
    components = components or one_layout(parallel, encoders)
    language = build_layout(parallel, device, components.language.ranks)
    layouts = {name: build_layout(of.parallel, device, of.ranks) for name, of in components.encoders.items()}
    return Meshes(language, layouts, components)


def build_layout(parallel: ParallelConfig, device: torch.device, ranks: Sequence[int] | None = None) -> Layout:
    """Builds a component's meshes and groups. A collective: every rank of the job calls it with the same sizes.
    `ranks` are those with the component; by default all."""
    everyone = range(dist.get_world_size())
    members = list(everyone if ranks is None else ranks)
    outsiders = [rank for rank in everyone if rank not in members]
    alone = [[rank] for rank in outsiders]
    outer = (parallel.pp, parallel.dp_replicate)
    dense = (*outer, parallel.fsdp_size, parallel.tp)
    experts = (*outer, parallel.expert_ranks // parallel.ep, parallel.ep)
    places = torch.tensor(members).reshape(parallel.pp, parallel.num_data_ranks, parallel.cp, parallel.tp)
    by_data = places.permute(0, 2, 3, 1).flatten(0, 2).tolist()
    by_stage = places.permute(1, 2, 3, 0).flatten(0, 2).tolist()
    by_cp = places.permute(0, 1, 3, 2).flatten(0, 2).tolist()
    last = 0 if SCHEDULES[parallel.schedule].is_v else -1
    return Layout(
        parallel=parallel,
        device=device,
        mesh=_mesh(device, torch.tensor(members).reshape(dense), DENSE_AXES),
        expert_mesh=(_mesh(device, torch.tensor(members).reshape(experts), EXPERT_AXES) if parallel.ep > 1 else None),
        cp_group=own_group(by_cp) if parallel.cp > 1 else None,
        world_control=_control_group([list(everyone)]),
        stage_control=_control_group(places.flatten(1).tolist() + alone),
        data_control=_control_group(by_data + alone),
        pp_control=_control_group(by_stage + alone),
        ends_group=own_group([sorted({ranks_[0], ranks_[last]}) for ranks_ in by_stage]),
        message_groups=_message_groups(by_stage, device) if parallel.virtual_stages > 1 else {},
        outsiders_control=own_group([[by_stage[0][last], *outsiders]], "gloo") if outsiders else None,
        outsiders_leader=by_stage[0][last],
        is_outsider=dist.get_rank() not in members,
    )


def _mesh(device: torch.device, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=names)
    if dist.get_rank() in ranks:
        set_timeouts(mesh.get_all_groups(), longest_wait())
    return mesh


def _message_groups(by_stage: list[list[int]], device: torch.device) -> dict[tuple[str, int], dist.ProcessGroup]:
    """Creates groups in which a message waits only for earlier messages of the same kind, sender and receiver.

    NCCL runs a group's messages in order. With several stages per rank, a receive would delay sends that another rank
    needs first: at pp 4 with 2 stages per rank and 8 microbatches, 12 points of bubble (benchmarks/speed.md).
    """
    groups = {}
    for message in MESSAGES:
        for parity in (0, 1):
            group = own_group(by_stage)
            if group is None:  # an outsider
                continue
            # Connects all members: the first message involves only two, and NCCL would wait for the rest.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            groups[message, parity] = group
    return groups


def _control_group(groups: list[list[int]]) -> dist.ProcessGroup:
    group = own_group(groups, "gloo")
    assert group is not None  # these groups cover all ranks
    return group


def own_group(groups: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """Creates all groups, as every rank must, and returns the one with this rank; None if there is none."""
    own = None
    for members in groups:
        group = dist.new_group(members, backend=backend, timeout=longest_wait())
        if dist.get_rank() in members:
            own = group
    return own
