"""Weights for generators on GPUs of their own: each stage broadcasts its weights to all of them, by NCCL or gloo."""

import contextlib
import os
from collections.abc import Callable, Sequence

import torch.distributed as dist

from automodel_rl.errors import WeightSyncError, reason
from automodel_rl.generator_messages import Committed
from automodel_rl.hf.buckets import Plan
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.weight_sync.channel import (
    Channel,
    abort_quietly,
    call,
    expect,
    generator_timeout,
    handshake,
    send_call,
)
from automodel_rl.weight_sync.link import Address, Link, raise_failure, report_failure
from automodel_rl.weight_sync.senders import Senders
from automodel_rl.weight_sync.slots import Slot, Slots
from automodel_rl.weight_sync.transport import Transport

LEAVE_SECONDS = 10.0


class CollectiveTransport(Transport):
    """Sends to all generators at once. Each rank has a generator; one rank of each stage sends the stage's weights."""

    reach = "own stages"

    def __init__(self, channel: Channel, handle: ModelHandle, seconds: float):
        self.channel, self.layout, self.seconds = channel, handle.layout, seconds
        self.senders = Senders(handle).assigned
        self.generation = 0
        self.server: dist.TCPStore | None = None  # only on the first rank
        self.store: dist.Store | None = None
        self.links: dict[int, Link] = {}  # by number of the senders for which this rank sends
        self.plans: Sequence[Plan] = []
        self.in_flight: dict[int, tuple[Link, Callable[[], bool]]] = {}

    def connect(self, plans: Sequence[Plan], num_bytes: int, num_buffers: int) -> Slots:
        self._leave()
        self.plans = plans
        largest = max(1, *(plan.largest_bucket for plan in plans))
        self._all_agree(lambda: self._prepare_generator(plans, largest, num_buffers))
        address = self._address()
        num_generators = dist.get_world_size()
        send_call(
            self.channel, "join", address, len(plans), dist.get_rank(), num_generators, generator_timeout(self.seconds)
        )
        self.store = address.store(self.seconds)
        for sender in self.senders:
            name, size = f"sender{sender}", 1 + num_generators
            self.links[sender] = Link(self.store, name, 0, size, self.layout.device, self.seconds)
        expect(self.channel, "join", self.seconds)
        return Slots.allocate(num_bytes, num_buffers, self.layout.device)

    def begin(self, version: int, *, frozen: bool) -> None:
        self.in_flight = {}
        send_call(self.channel, "begin", version, generator_timeout(self.seconds))
        send_call(self.channel, "receive", frozen)

    def release(self, slot: Slot) -> None:
        sending = self.in_flight.pop(slot.number, None)
        if sending is not None:
            link, done = sending
            link.wait(lambda: slot.has_room() and done(), self._watch)

    def send(self, sender: int, number: int, slot: Slot) -> None:
        link = self.links.get(sender)
        if link is not None:
            num_bytes = self.plans[sender].buckets[number].num_bytes
            self.in_flight[slot.number] = link, link.start(slot.buffer[:num_bytes])

    def commit(self, version: int, *, sums: bool) -> Committed:
        for link, done in self.in_flight.values():
            link.wait(done, self._watch)
        expect(self.channel, "receive", self.seconds, self._watch)
        committed: Committed = call(self.channel, "commit", sums, seconds=self.seconds)
        return committed

    def abort(self) -> None:
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # the first rank may be gone, and the store with it
                report_failure(self.store, f"rank {dist.get_rank()} gave up")
        abort_quietly(self.channel)
        self._leave()

    def close(self) -> None:
        was_open = self.store is not None
        if was_open:
            with contextlib.suppress(WeightSyncError):
                send_call(self.channel, "leave")
        self._leave()  # both sides at once, because NCCL waits for the other
        if was_open:
            with contextlib.suppress(WeightSyncError):
                expect(self.channel, "leave", LEAVE_SECONDS)

    def _leave(self) -> None:
        self.store = None
        self.in_flight = {}
        for link in self.links.values():
            link.close(broken=True)
        self.links = {}

    def _prepare_generator(self, plans: Sequence[Plan], num_bytes: int, num_buffers: int) -> None:
        handshake(self.channel, plans, self.seconds)
        call(self.channel, "allocate_buffers", num_bytes, num_buffers, seconds=self.seconds)

    def _all_agree(self, work: Callable[[], None]) -> None:
        """Calls `work` on every rank. If it fails on one, raises on all, so that no rank waits for another in vain."""
        problem = ""
        try:
            work()
        except Exception as error:
            problem = reason(error)
        problems = gather_objects(problem, self.layout.world_control)
        failed = next((rank for rank, text in enumerate(problems) if text), None)
        if problem:
            raise WeightSyncError(problem)
        if failed is not None:
            raise WeightSyncError(f"rank {failed}: {problems[failed]}")

    def _address(self) -> Address:
        """Returns the address of the store, which the first rank serves until the job ends."""
        self.generation += 1
        port = 0
        if dist.get_rank() == 0:
            if self.server is None:
                self.server = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            port = self.server.port
        address = Address(os.environ.get("MASTER_ADDR", "localhost"), port, self.generation)
        return gather_objects(address, self.layout.world_control)[0]

    def _watch(self) -> None:
        """Raises WeightSyncError if a generator or another sender is gone."""
        assert self.store is not None  # while a weight sync runs
        raise_failure(self.store)
        self.channel.ready()
