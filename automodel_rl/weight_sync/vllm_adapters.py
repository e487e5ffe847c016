"""Adapters alone for vLLM: a folder in PEFT's format, in memory, under a new name for each weight sync.

vLLM reads adapters from files only. It loads them while requests run, which finish with the adapter they began with.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from automodel_rl.files import TemporaryFolder
from automodel_rl.generator_messages import Committed
from automodel_rl.hf.adapter_pieces import write_for_vllm
from automodel_rl.hf.buckets import Plan
from automodel_rl.lora.peft import AdapterOrigin
from automodel_rl.weight_sync.channel import Channel, call
from automodel_rl.weight_sync.slots import Slot, Slots
from automodel_rl.weight_sync.transport import Transport

IN_MEMORY = Path("/dev/shm")


class VllmAdapters(Transport):
    """Writes the adapters of all stages to files, and makes this rank's vLLM load them."""

    reach = "all stages"
    whole = True

    def __init__(self, channel: Channel, origin: AdapterOrigin, device: torch.device, seconds: float):
        self.channel, self.origin, self.device, self.seconds = channel, origin, device, seconds
        self.plans: Sequence[Plan] = []
        self.tensors: dict[str, Tensor] = {}

    def connect(self, plans: Sequence[Plan], num_bytes: int, num_buffers: int) -> Slots:
        self.plans = plans
        return Slots.allocate(num_bytes, num_buffers, self.device)

    def begin(self, version: int, *, frozen: bool) -> None:
        self.tensors = {}

    def release(self, slot: Slot) -> None:
        """Does nothing: `send` has read the slot."""

    def send(self, sender: int, number: int, slot: Slot) -> None:
        plan = self.plans[sender]
        bucket = plan.buckets[number]
        elements = bucket.elements(slot.buffer).cpu()  # waits for the slot's stream
        for chunk in bucket.chunks:
            spec = plan.tensors[chunk.tensor]
            flat = elements[chunk.offset : chunk.offset + chunk.count]
            self.tensors[spec.name] = flat.view(spec.dtype).view(spec.shape).clone()

    def commit(self, version: int, *, sums: bool) -> Committed:
        with TemporaryFolder(IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
            write_for_vllm(Path(folder), self.tensors, self.origin)
            committed: Committed = call(self.channel, "load_adapter", version, folder, seconds=self.seconds)
            return committed

    def abort(self) -> None:
        """Drops the adapters: the generator keeps an older version."""
        self.tensors = {}

    def close(self) -> None:
        """Does nothing."""
