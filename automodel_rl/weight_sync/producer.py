"""The trainer's side of a weight sync: packs tensors of this rank's stages, and optionally of all, into buffers."""

from typing import Literal

import torch
from torch import Tensor

from automodel_rl.hf.buckets import Plan, Source, StageBuckets
from automodel_rl.model.handle import Component, ModelHandle
from automodel_rl.weight_sync.checksum import checksum
from automodel_rl.weight_sync.receiver import in_turn
from automodel_rl.weight_sync.senders import Senders
from automodel_rl.weight_sync.slots import Slot

Reach = Literal["own stages", "all stages"]


class Producer:
    """Fills buffers with the model's tensors, bucket by bucket. Every rank of the job has one.

    Args:
        max_bytes: largest bucket.
        whole: never split a tensor, for generators that load whole tensors.
        adapters_alone: send only the adapters, under the model's names.

    Attributes:
        plans: of all senders; equal on all ranks.
    """

    def __init__(
        self,
        handle: ModelHandle,
        dtype: torch.dtype,
        max_bytes: int,
        *,
        whole: bool = False,
        adapters_alone: bool = False,
        reach: Reach,
    ):
        self.handle, self.dtype, self.adapters_alone, self.reach = handle, dtype, adapters_alone, reach
        self._senders = Senders(handle)
        self._stages = {
            number: StageBuckets(self._sources(component), handle.family, component.layout, max_bytes, whole=whole)
            for number, component in self._senders.own.items()
        }
        plans = self._senders.gather({number: stage.plan for number, stage in self._stages.items()})
        self.plans: list[Plan] = [*plans.values()]
        self._sums: dict[str, list[Tensor]] = {}

    @property
    def largest_bucket(self) -> int:
        """Required size of a buffer, in bytes."""
        return max(self.plans[sender].largest_bucket for sender in {s for s, _ in self.turns(True)} | {*self._stages})

    def turns(self, frozen: bool) -> list[tuple[int, int]]:
        everyone = in_turn(self.plans, frozen=frozen)
        return everyone if self.reach == "all stages" else [pair for pair in everyone if pair[0] in self._stages]

    def begin(self) -> None:
        """Begins a weight sync: with LoRA, reads the adapters as they are now. A collective of each stage's ranks."""
        if self.handle.model.lora is not None:
            for number, component in self._senders.own.items():  # merges the adapters as they are now
                self._stages[number].reread(self._sources(component))
        self._sums = {}

    def fill(self, sender: int, number: int, slot: Slot, *, sums: bool) -> None:
        """Packs a bucket into a slot, on the current stream. A collective of the stage's ranks, and of those that
        receive the bucket from them."""
        bucket, stage = self.plans[sender].buckets[number], self._stages.get(sender)
        if stage is not None:
            if (sender, number) not in slot.targets:
                slot.targets[sender, number] = stage.targets(number, slot.buffer)
            stage.pack(number, slot.targets[sender, number])
        if self.reach == "all stages":
            self._senders.broadcast(slot.buffer[: bucket.num_bytes], sender)
        if sums:
            elements = bucket.elements(slot.buffer)
            for chunk in bucket.chunks:
                name = self.plans[sender].tensors[chunk.tensor].name
                part = checksum(elements[chunk.offset : chunk.offset + chunk.count], chunk.start)
                self._sums.setdefault(name, []).append(part)  # added up later, because each slot has its own stream

    def checksums(self) -> dict[str, int]:
        """Returns the checksum of every tensor as packed. A collective, to call after `Slots.join_streams`."""
        own = {name: int(torch.stack(parts).sum()) for name, parts in self._sums.items()}
        stages = self._senders.gather(dict.fromkeys(self._stages, own))
        return {name: total for sums in stages.values() for name, total in sums.items()}

    def _sources(self, component: Component) -> list[Source]:
        if self.adapters_alone:
            return self.handle.adapter_sources(self.dtype)
        return [s for s in self.handle.hf_sources(component, self.dtype) if not self.handle.is_mtp(s.name)]
