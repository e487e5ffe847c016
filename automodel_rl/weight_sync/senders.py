"""Senders of a weight sync: the pipeline stages of every component, and how their buckets reach all ranks.

Senders are numbered: the stages of the language model first, then those of each encoder.
"""

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from automodel_rl.model.handle import Component, ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects

T = TypeVar("T")


class Senders:
    """The senders of a model.

    Attributes:
        own: by number of the sender: the components of which this rank has a part.
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
    def assigned(self) -> list[int]:
        """The senders for which this rank writes, if only one rank of each should."""
        return [number for number, component in self.own.items() if component.layout.writes_for_stage]

    def gather(self, own: dict[int, T]) -> dict[int, T]:
        """Collects each sender's value from its ranks, by number of the sender. A collective."""
        group = self.layout.world_control if self.handle.has_encoder else self.layout.pp_control
        found = {number: value for share in gather_objects(own, group) for number, value in share.items()}
        return dict(sorted(found.items()))

    def broadcast(self, buffer: Tensor, sender: int) -> None:
        """Broadcasts a bucket to the ranks outside its sender. A collective of pipeline peers, or of all ranks of the
        job if components have ranks of their own."""
        if self._is_apart:
            dist.broadcast(buffer, src=self._first_ranks[sender])
            return
        name, stage = self._stages[sender]
        layout = self._layouts[name]
        if layout.parallel.pp > 1:
            dist.broadcast(buffer, group=layout.pp_group, group_src=stage)
