"""Weights for a generator in this process: copied from the packed buffers to its tensors."""

from collections.abc import Sequence

import torch

from automodel_rl.generator_messages import Committed
from automodel_rl.hf.buckets import Plan
from automodel_rl.weight_sync.receiver import Receiver
from automodel_rl.weight_sync.slots import Slot, Slots
from automodel_rl.weight_sync.transport import Transport


class LocalTransport(Transport):
    """Copies weights to the generator of this process, on the same device."""

    reach = "all stages"

    def __init__(self, receiver: Receiver, device: torch.device):
        self.receiver, self.device = receiver, device

    def connect(self, plans: Sequence[Plan], num_bytes: int, num_buffers: int) -> Slots:
        self.receiver.agree(plans)
        return Slots.allocate(num_bytes, num_buffers, self.device)

    def begin(self, version: int, *, frozen: bool) -> None:
        self.receiver.begin()

    def release(self, slot: Slot) -> None:
        """Does nothing: the slot's stream orders all its uses."""

    def send(self, sender: int, number: int, slot: Slot) -> None:
        self.receiver.load(sender, number, slot.buffer)

    def commit(self, version: int, *, sums: bool) -> Committed:
        self.receiver.commit(version)
        return Committed(self.receiver.version, self.receiver.checksums() if sums else None)

    def abort(self) -> None:
        """Does nothing: the receiver has no version until the next commit."""

    def close(self) -> None:
        """Does nothing."""
