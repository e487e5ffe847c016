"""Weights for vLLM by its own weight transfer: over IPC to a process on the same device, over NCCL to others.

vLLM loads whole tensors by their checkpoint names, one expert at a time, so tensors are never split. Each bucket is
one call.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from automodel_rl.errors import WeightSyncError, describe_root_cause, reason
from automodel_rl.generator_messages import Committed
from automodel_rl.hf.buckets import Plan
from automodel_rl.launch.local import free_port
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import Layout
from automodel_rl.weight_sync.channel import Channel, abort_quietly, call, expect, generator_timeout, send_call
from automodel_rl.weight_sync.nccl import NcclSender
from automodel_rl.weight_sync.shared_memory import interprocess_event, share, unlink
from automodel_rl.weight_sync.slots import Slot, Slots, in_time, wait_until
from automodel_rl.weight_sync.transport import Transport

T = TypeVar("T")

MAX_UNANSWERED = 8
"""Most buckets that vLLM has not answered. More messages could fill the pipe and block this rank."""


class VllmChannel(Channel, Protocol):
    """Channel to one vLLM process, or to several servers."""

    @property
    def num_workers(self) -> int:
        """Number of processes that hold weights."""
        ...

    @property
    def addresses(self) -> list[str]:
        """Addresses of the servers that receive weights; empty for a process."""
        ...


class _Vllm(Transport):
    """Base of both transports: one message and one answer per bucket."""

    reach = "all stages"
    whole = True

    def __init__(self, channel: VllmChannel, seconds: float):
        self.channel, self.seconds = channel, seconds
        self.plans: Sequence[Plan] = []
        self.asked = 0

    def begin(self, version: int, *, frozen: bool) -> None:
        self.asked = 0
        send_call(self.channel, "begin", version, generator_timeout(self.seconds))

    def commit(self, version: int, *, sums: bool) -> Committed:
        self._take_answers(0)
        committed: Committed = call(self.channel, "commit", False, seconds=self.seconds)
        return committed

    def abort(self) -> None:
        abort_quietly(self.channel)
        self.close()

    def _load(self, info: dict[str, Any]) -> None:
        send_call(self.channel, "load_weights", info)
        self.asked += 1

    def _take_answers(self, left: int) -> None:
        while self.asked > left:
            expect(self.channel, "load_weights", self.seconds)
            self.asked -= 1

    def _describe(self, sender: int, number: int) -> dict[str, Any]:
        plan = self.plans[sender]
        specs = [plan.tensors[chunk.tensor] for chunk in plan.buckets[number].chunks]
        return {
            "names": [spec.name for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "dtype_names": [str(spec.dtype).removeprefix("torch.") for spec in specs],
        }


class VllmSameDevice(_Vllm):
    """Sends to a vLLM process on this process's device, or to one that spans the devices of several ranks.

    Each worker of vLLM reads the buffers of the rank on its device, and all these ranks fill theirs with the same
    bytes. The first of them talks to vLLM, in lockstep with the others.

    Args:
        channel: a `NoGenerator` on the others.
        group: the ranks on whose devices vLLM runs; None for this rank alone.
    """

    def __init__(
        self, channel: VllmChannel, device: torch.device, seconds: float, group: dist.ProcessGroup | None = None
    ):
        super().__init__(channel, seconds)
        self.device, self.group = device, group
        self._failure = ""  # of this rank, to be shared with the others

    def connect(self, plans: Sequence[Plan], num_bytes: int, num_buffers: int) -> Slots:
        self.plans, self.num_buffers, self._failure, device = plans, num_buffers, "", self.device
        made = self._together(
            lambda: [share(num_bytes, device, interprocess_event(device)) for _ in range(num_buffers)]
        )
        own = [shared.cuda or (shared.file,) for _, shared in made]
        try:
            of_workers = [own] if self.group is None else gather_objects(own, self.group)
            self._together(lambda: self._open(of_workers))
        finally:
            for _, shared in made:
                unlink(shared)
        return Slots([buffer for buffer, _ in made])

    def begin(self, version: int, *, frozen: bool) -> None:
        self._failure = ""
        self._together(functools.partial(super().begin, version, frozen=frozen))

    def release(self, slot: Slot) -> None:
        self._together(lambda: self._take_answers(self.num_buffers - 1))

    def send(self, sender: int, number: int, slot: Slot) -> None:
        if slot.stream is not None:
            slot.stream.synchronize()  # vLLM reads it on receiving the message, without waiting for this stream
        self._together(lambda: None)  # each worker reads another rank's buffer
        try:
            self._load({"buffer": slot.number, **self._describe(sender, number)})
        except WeightSyncError as error:
            self._failure = str(error)

    def commit(self, version: int, *, sums: bool) -> Committed:
        return self._together(functools.partial(super().commit, version, sums=sums))

    def _open(self, of_workers: list[list[tuple[Any, ...]]]) -> None:
        call(self.channel, "init_transfer", {"buffers": of_workers}, seconds=self.seconds)

    def _together(self, work: Callable[[], T]) -> T:
        """Calls `work` on all ranks of the group. If it fails on one, raises on all."""
        done: list[T] = []
        try:
            if not self._failure:
                done.append(work())
        except Exception as error:
            self._failure = reason(error)
        failures = [self._failure] if self.group is None else gather_objects(self._failure, self.group)
        problems = [text for text in failures if text]
        if problems:
            raise WeightSyncError(problems[0])
        return done[0]

    def close(self) -> None:
        """Does nothing."""


class VllmNccl(_Vllm):
    """Sends to vLLM processes on other devices, or to servers: the first rank broadcasts tensor by tensor.

    vLLM also takes packed buffers over NCCL, but loads them on streams that its next step does not wait for.
    """

    sender: NcclSender | None = None
    is_ready = False

    def __init__(self, channel: VllmChannel, layout: Layout, seconds: float):
        super().__init__(channel, seconds)
        self.layout = layout

    def connect(self, plans: Sequence[Plan], num_bytes: int, num_buffers: int) -> Slots:
        self.close()
        self.plans = plans
        rank = dist.get_rank()
        place = (os.environ.get("MASTER_ADDR", "localhost"), free_port())
        answers = gather_objects((*self._workers(), place, self.channel.addresses), self.layout.world_control)
        workers, problems, places, addresses = zip(*answers, strict=True)
        if any(problems):
            raise WeightSyncError(next(problem for problem in problems if problem))
        (host, port), world_size = places[0], 1 + sum(workers)
        init = {"master_address": host, "master_port": port, "world_size": world_size}
        init |= {"servers": addresses[0]} if addresses[0] else {}
        send_call(self.channel, "init_transfer", {**init, "rank_offset": 1 + sum(workers[:rank])})
        self.is_ready = False
        if rank == 0:
            self.sender = self._join_workers(host, port, world_size)
        if not self.is_ready:
            expect(self.channel, "init_transfer", self.seconds)
        return Slots.allocate(num_bytes, num_buffers, self.layout.device)

    def release(self, slot: Slot) -> None:
        wait_until(slot.has_room, "a bucket of weights", self.seconds, self._watch)
        self._take_answers(MAX_UNANSWERED)

    def send(self, sender: int, number: int, slot: Slot) -> None:
        self._load(self._describe(sender, number))
        if self.sender is not None:
            bucket = self.plans[sender].buckets[number]
            elements = bucket.elements(slot.buffer)
            for chunk in bucket.chunks:
                self.sender.broadcast(elements[chunk.offset : chunk.offset + chunk.count])

    def close(self) -> None:
        if self.sender is not None:
            self.sender.abort()
            self.sender = None

    def _workers(self) -> tuple[int, str]:
        """Returns the number of this rank's vLLM workers, and an error if vLLM does not answer."""
        try:
            return self.channel.num_workers, ""
        except (OSError, ValueError, LookupError) as error:
            return 0, f"vLLM does not answer: {describe_root_cause(error)}"

    def _watch(self) -> None:
        self.channel.ready()

    def _join_workers(self, host: str, port: int, world_size: int) -> NcclSender:
        return in_time(
            lambda: NcclSender(host, port, world_size, self.layout.device, self.seconds),
            "joining vLLM's workers",
            self.seconds,
            self._take_early_answer,
        )

    def _take_early_answer(self) -> None:
        """Receives success or an error while this rank joins."""
        if self.channel.ready():
            expect(self.channel, "init_transfer", self.seconds)
            self.is_ready = True
