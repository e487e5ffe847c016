"""Weights for a generator in another process on the same device, which reads the packed buffers in place."""

import itertools
from collections.abc import Sequence

import torch

from automodel_rl.generator_messages import Committed
from automodel_rl.hf.buckets import Plan
from automodel_rl.weight_sync.channel import (
    Channel,
    abort_quietly,
    call,
    expect,
    generator_timeout,
    handshake,
    send_call,
)
from automodel_rl.weight_sync.shared_memory import SharedBuffer, share, unlink
from automodel_rl.weight_sync.slots import Slot, Slots
from automodel_rl.weight_sync.transport import Transport


class IpcTransport(Transport):
    """Shares buffers with a generator: by CUDA IPC handles, or as shared memory on the CPU.

    This rank fills a slot and sends a message; the generator reads the slot and answers. On CUDA both sides only queue
    work: the generator's stream waits for an event recorded after the filling, and this rank's stream for one recorded
    after the reading.
    """

    reach = "all stages"

    def __init__(self, channel: Channel, device: torch.device, seconds: float):
        self.channel, self.device, self.seconds = channel, device, seconds
        self.is_cuda = device.type == "cuda"
        self.filled: list[torch.cuda.Event] = []
        self.emptied: list[torch.cuda.Event] = []
        self.out: set[int] = set()

    def connect(self, plans: Sequence[Plan], num_bytes: int, num_buffers: int) -> Slots:
        handshake(self.channel, plans, self.seconds)
        self.filled = [torch.cuda.Event(interprocess=True) for _ in range(num_buffers)] if self.is_cuda else []
        made = [
            share(num_bytes, self.device, filled)
            for filled, _ in itertools.zip_longest(self.filled, range(num_buffers))
        ]
        shared: list[SharedBuffer] = [description for _, description in made]
        try:
            handles = call(self.channel, "open_buffers", shared, seconds=self.seconds)
        finally:
            for description in shared:
                unlink(description)
        self.emptied = [torch.cuda.Event.from_ipc_handle(self.device, handle) for handle in handles]
        self.out = set()
        return Slots([buffer for buffer, _ in made])

    def begin(self, version: int, *, frozen: bool) -> None:
        self.out = set()
        send_call(self.channel, "begin", version, generator_timeout(self.seconds))

    def release(self, slot: Slot) -> None:
        while slot.number in self.out:
            self._take_answer()
        if slot.stream is not None and self.emptied:
            slot.stream.wait_event(self.emptied[slot.number])

    def send(self, sender: int, number: int, slot: Slot) -> None:
        if slot.stream is not None:
            self.filled[slot.number].record(slot.stream)
        send_call(self.channel, "bucket", sender, number, slot.number)
        self.out.add(slot.number)

    def commit(self, version: int, *, sums: bool) -> Committed:
        send_call(self.channel, "commit", sums)
        while self.out:
            self._take_answer()
        committed: Committed = expect(self.channel, "commit", self.seconds)
        return committed

    def abort(self) -> None:
        abort_quietly(self.channel)

    def close(self) -> None:
        """Does nothing: the buffers are freed with the slots."""

    def _take_answer(self) -> None:
        self.out.remove(expect(self.channel, "bucket", self.seconds))
