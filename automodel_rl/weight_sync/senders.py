"""Senders of a weight sync: the stages of every component, and how a bucket of one reaches all ranks.

Senders have numbers: first the pipeline ranks of the language model, then those of each encoder.
"""

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from automodel_rl.model.handle import Component, ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects

T = TypeVar("T")


class Senders:
    """The senders of a model, and those among them that this rank has a part of.

    Args:
        handle: the model.

    Attributes:
        own: the components that this rank has parts of, by the number of their sender.
    """

    def __init__(self, handle: ModelHandle):
        self.handle, self.layout = handle, handle.layout
        self._layouts = {"language": self.layout, **handle.meshes.encoders}
        self._stages = [(name, stage) for name, of in self._layouts.items() for stage in range(of.parallel.pp)]
        self.own: dict[int, Component] = {
            self._stages.index((component.name, component.layout.pp_rank)): component for component in handle.components
        }
        components = handle.meshes.components
        self._is_apart, self._first_ranks = False, list[int]()
        if components is not None:
            self._is_apart = not all(map(components.is_colocated, components.encoders))
            ranks = {"language": components.language.ranks} | {n: of.ranks for n, of in components.encoders.items()}
            for name, layout in self._layouts.items():
                self._first_ranks += ranks[name][:: layout.ranks_per_stage]

    @property
    def written(self) -> list[int]:
        """The senders that this rank stands for where only one rank should write."""
        return [number for number, component in self.own.items() if component.layout.writes_for_stage]

    def gather(self, own: dict[int, T]) -> dict[int, T]:
        """What every sender has, by its number, given that of this rank's senders. A collective."""
        group = self.layout.world_control if self.handle.has_encoder else self.layout.pp_control
        found = {number: value for share in gather_objects(own, group) for number, value in share.items()}
        return dict(sorted(found.items()))

    def spread(self, buffer: Tensor, sender: int) -> None:
        """Gives a bucket to all ranks that its sender does not include. A collective of pipeline peers, or of all ranks
        of the job if components are on ranks of their own."""
        if self._is_apart:
            dist.broadcast(buffer, src=self._first_ranks[sender])
            return
        name, stage = self._stages[sender]
        layout = self._layouts[name]
        if layout.parallel.pp > 1:
            dist.broadcast(buffer, group=layout.pp_group, group_src=stage)
