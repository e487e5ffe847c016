"""The trainer's side of a weight sync: packs this rank's tensors, and if asked other stages' tensors, into buffers."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.errors import InputError
from automodel_rl.hf.buckets import Plan, Source, StageBuckets
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.weight_sync.checksum import checksum
from automodel_rl.weight_sync.receiver import in_turn
from automodel_rl.weight_sync.slots import Slot

Reach = Literal["own stages", "all stages"]
"""The stages whose buckets a rank fills into its buffers."""


class Producer:
    """Fills buffers with the model's tensors, bucket by bucket. Every rank of the job has one.

    Args:
        handle: the model.
        dtype: the dtype in which parameters are sent.
        most_bytes: largest size of a bucket.
        whole: never cut a tensor, for generators that load whole tensors.
        adapters_alone: send only the adapters, under the model's names.
        reach: "own stages", or "all stages" to also get the buckets of this rank's pipeline peers.

    Attributes:
        plans: the plan of every pipeline rank; equal on all ranks.
        turns: pairs (pipeline rank, bucket) in the order in which this rank fills buffers.
    """

    def __init__(
        self,
        handle: ModelHandle,
        dtype: torch.dtype,
        most_bytes: int,
        *,
        whole: bool = False,
        adapters_alone: bool = False,
        reach: Reach,
    ):
        if handle.has_encoder:  # of a run the table of supported combinations has refused it
            raise InputError("weight sync: generators have no encoder of images: use a model that reads text only")
        self.handle, self.dtype, self.adapters_alone = handle, dtype, adapters_alone
        self.layout = handle.layout
        self._stage = StageBuckets(self._sources(), handle.family, self.layout, most_bytes, whole=whole)
        self.plans: list[Plan] = gather_objects(self._stage.plan, self.layout.pp_control)
        own = [(self.layout.pp_rank, number) for number in range(len(self._stage.plan.buckets))]
        self.turns = own if reach == "own stages" else in_turn(self.plans)
        self.shares = reach == "all stages" and self.layout.parallel.pp > 1
        self._sums: dict[str, list[Tensor]] = {}

    @property
    def largest_bucket(self) -> int:
        """Bytes that a buffer must hold."""
        return max(self.plans[sender].largest_bucket for sender in {s for s, _ in self.turns} | {self.layout.pp_rank})

    def begin(self) -> None:
        """Begins a weight sync with the weights that the model has now. A collective of each stage's ranks."""
        if self.handle.model.lora is not None:
            self._stage.reread(self._sources())  # merges the adapters as they are now
        self._sums = {}

    def fill(self, sender: int, number: int, slot: Slot, *, sums: bool) -> None:
        """Packs a bucket into a slot, on the current stream. A collective of the stage's ranks and of pipeline peers.

        Args:
            sender: the pipeline rank that owns the bucket.
            number: the bucket's number.
            slot: the slot to fill.
            sums: take checksums of the packed tensors.
        """
        bucket = self.plans[sender].buckets[number]
        if sender == self.layout.pp_rank:
            if number not in slot.targets:
                slot.targets[number] = self._stage.targets(number, slot.buffer)
            self._stage.pack(number, slot.targets[number])
        if self.shares:
            dist.broadcast(slot.buffer[: bucket.num_bytes], group=self.layout.pp_group, group_src=sender)
        if sums:
            elements = bucket.elements(slot.buffer)
            for chunk in bucket.chunks:
                name = self.plans[sender].tensors[chunk.tensor].name
                part = checksum(elements[chunk.offset : chunk.offset + chunk.count], chunk.start)
                self._sums.setdefault(name, []).append(part)  # added up later, because each slot has its own stream

    def checksums(self) -> dict[str, int]:
        """The checksum of every tensor of the model as it was packed. A collective, to call after `Slots.rejoin`."""
        own = {name: int(torch.stack(parts).sum()) for name, parts in self._sums.items()}
        return {name: total for stage in gather_objects(own, self.layout.pp_control) for name, total in stage.items()}

    def _sources(self) -> list[Source]:
        if self.adapters_alone:
            return self.handle.adapter_sources(self.dtype)
        (component,) = self.handle.components
        return self.handle.hf_sources(component, self.dtype)
