"""The generator's end of a channel: handles the rank's messages between two tokens."""

import functools
import queue
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.errors import WeightSyncError, reason
from automodel_rl.generator_messages import Answer, Call, Committed, Failure, Hello, Message, Verb, unknown
from automodel_rl.weight_sync.link import Address, Link, raise_failure
from automodel_rl.weight_sync.receiver import Receiver, in_turn
from automodel_rl.weight_sync.shared_memory import SharedBuffer
from automodel_rl.weight_sync.slots import Slots

ROOM = 0.8
"""Share of the free device memory that buffers may take."""


class GeneratorEnd:
    """Handles a rank's messages about weights, and answers them."""

    def __init__(
        self,
        receiver: Receiver,
        device: torch.device,
        messages: "queue.Queue[Message]",
        answer: Callable[[Message], None],
    ):
        self.receiver, self.device, self.messages, self.answer = receiver, device, messages, answer
        self.slots = Slots([])
        self.filled: list[torch.cuda.Event] = []
        self.emptied: list[torch.cuda.Event] = []
        self.links: list[Link] = []
        self.store: dist.Store | None = None

    def handle(self, message: Message) -> None:
        """Handles a message, and reports errors to the rank. A failed weight sync leaves no complete weights."""
        try:
            match message:
                case Hello():
                    self.answer(message)
                case Call("begin", (version, seconds)):
                    self._sync(version, seconds)
                case Call("bucket" | "receive" | "commit" | "abort"):
                    pass  # left over from a weight sync that failed
                case Call(verb, arguments):
                    self.answer(Answer(verb, self._do(verb, arguments)))
                case _:
                    raise unknown(message)
        except Exception as error:
            self._leave()
            self.answer(Failure(reason(error)))

    def _do(self, verb: Verb, arguments: tuple[Any, ...]) -> Any:
        match verb:
            case "agree":
                return self.receiver.agree(*arguments)
            case "open_buffers":
                return self._open(*arguments)
            case "allocate_buffers":
                return self._allocate_buffers(*arguments)
            case "join":
                return self._join(*arguments)
            case "leave":
                return self._leave()
            case _:
                raise unknown(Call(verb, arguments))

    def _open(self, buffers: Sequence[SharedBuffer]) -> list[bytes]:
        self.slots = Slots([buffer.open(self.device) for buffer in buffers])
        if self.device.type == "cpu":
            return []
        self.filled = [torch.cuda.Event.from_ipc_handle(self.device, buffer.filled) for buffer in buffers]
        self.emptied = [torch.cuda.Event(interprocess=True) for _ in buffers]
        return [event.ipc_handle() for event in self.emptied]

    def _allocate_buffers(self, num_bytes: int, num_buffers: int) -> int:
        """Allocates buffers, fewer than asked for if no more fit, and returns their number."""
        self._leave()
        self.slots = Slots([])
        count = min(num_buffers, _room(self.device) // num_bytes)
        if count == 0:
            raise WeightSyncError(
                f"the generator's device has no room for a buffer of {num_bytes / 2**20:.0f} MiB: lower "
                "weight_sync.buffer_mib"
            )
        self.slots = Slots.allocate(num_bytes, count, self.device)
        return count

    def _leave(self) -> None:
        for link in self.links:
            link.close(broken=True)
        self.links = []

    def _join(self, address: Address, num_senders: int, generator: int, num_generators: int, seconds: float) -> None:
        store = self.store = address.store(seconds)
        self.links = [
            Link(store, f"sender{sender}", 1 + generator, 1 + num_generators, self.device, seconds)
            for sender in range(num_senders)
        ]

    def _sync(self, version: int, seconds: float) -> None:
        self.receiver.begin()
        self.slots.fork_streams()
        while True:
            try:
                message = self.messages.get(timeout=seconds)
            except queue.Empty:
                raise WeightSyncError(f"the trainer sent nothing for {seconds:g} s during a weight sync") from None
            match message:
                case Call("bucket", (sender, number, slot)):
                    self._take(sender, number, slot)
                    self.answer(Answer("bucket", slot))
                case Call("receive", (frozen,)):
                    self._receive(frozen)
                    self.answer(Answer("receive"))
                case Call("commit", (sums,)):
                    self._commit(version)
                    checksums = self.receiver.checksums() if sums else None
                    self.answer(Answer("commit", Committed(self.receiver.version, checksums)))
                    return
                case Call("abort"):
                    return
                case _:
                    raise unknown(message)

    def _commit(self, version: int) -> None:
        self.slots.join_streams()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.receiver.commit(version)

    def _take(self, sender: int, number: int, turn: int) -> None:
        slot = self.slots[turn]
        with slot.active():
            if slot.stream is not None:
                slot.stream.wait_event(self.filled[turn])
            self.receiver.load(sender, number, slot.buffer)
            if slot.stream is not None:
                self.emptied[turn].record(slot.stream)

    def _receive(self, frozen: bool) -> None:
        """Receives buckets over the links, at most one per slot at a time."""
        on_the_way: deque[tuple[int, int, int, Callable[[], bool]]] = deque()
        for turn, (sender, number) in enumerate(in_turn(self.receiver.plans, frozen=frozen)):
            while on_the_way and (len(on_the_way) == len(self.slots) or on_the_way[0][3]()):
                self._load_next(on_the_way)
            slot = self.slots[turn]
            self._wait(sender, slot.has_room)
            with slot.active():
                done = self.links[sender].start(self._part(sender, number, slot.buffer))
            on_the_way.append((turn, sender, number, done))
        while on_the_way:
            self._load_next(on_the_way)
        for slot in self.slots.ring:
            self._wait(0, slot.is_done)

    def _load_next(self, on_the_way: deque[tuple[int, int, int, Callable[[], bool]]]) -> None:
        turn, sender, number, done = on_the_way.popleft()
        slot = self.slots[turn]
        self._wait(sender, done)
        with slot.active():
            self.receiver.load(sender, number, slot.buffer)
            slot.mark()

    def _wait(self, sender: int, done: Callable[[], bool]) -> None:
        assert self.store is not None
        self.links[sender].wait(done, watch=functools.partial(raise_failure, self.store))

    def _part(self, sender: int, number: int, buffer: Tensor) -> Tensor:
        return buffer[: self.receiver.plans[sender].buckets[number].num_bytes]


def _room(device: torch.device) -> int:
    if device.type == "cpu":
        return 2**63
    free, _ = torch.cuda.mem_get_info(device)
    return int(ROOM * free)
