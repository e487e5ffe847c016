"""Buffers that are filled and emptied in turn, each on a stream of its own, so that the parts of a sync overlap."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from automodel_rl.errors import WeightSyncError
from automodel_rl.launch.background import in_thread

T = TypeVar("T")

TURNS_AHEAD = 4
"""Most turns of a slot that may be queued on its stream."""

POLL_SECONDS = 5e-5
WATCH_SECONDS = 0.1


class Slot:
    """A buffer and its stream. On the CPU there is no stream, and work is done at once.

    Args:
        number: its place in the ring.
        buffer: uint8.

    Attributes:
        targets: for each sender and bucket number, the views of the buffer that its tensors are written to.
    """

    def __init__(self, number: int, buffer: Tensor):
        self.number, self.buffer = number, buffer
        self.targets: dict[tuple[int, int], list[Tensor]] = {}
        self.stream = torch.cuda.Stream(buffer.device) if buffer.is_cuda else None
        self._uses: deque[torch.cuda.Event] = deque()

    def active(self) -> AbstractContextManager[None]:
        """Queues the work of a block on the slot's stream."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> None:
        """Notes that all work of this turn is queued."""
        if self.stream is not None:
            self.has_room()  # drops the events of turns that have ended
            self._uses.append(self.stream.record_event())

    def has_room(self) -> bool:
        """Whether another turn may be queued. Does not wait.

        The stream keeps turns in order. This limits their number, so that the host notices within a few turns that a
        peer no longer answers.
        """
        while self._uses and self._uses[0].query():
            self._uses.popleft()
        return len(self._uses) < TURNS_AHEAD

    def is_done(self) -> bool:
        """Whether the work of all turns has ended. Does not wait."""
        return self.has_room() and not self._uses


class Slots:
    """A ring of slots.

    Args:
        buffers: one for each slot.
    """

    def __init__(self, buffers: list[Tensor]):
        self.ring = [Slot(number, buffer) for number, buffer in enumerate(buffers)]

    @classmethod
    def allocate(cls, num_bytes: int, count: int, device: torch.device) -> "Slots":
        """Makes slots whose buffers no other process shares."""
        return cls([torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)])

    def __getitem__(self, turn: int) -> Slot:
        """The slot whose turn it is."""
        return self.ring[turn % len(self.ring)]

    def __len__(self) -> int:
        return len(self.ring)

    def join(self) -> None:
        """Makes all slots wait for the work queued on the current stream, such as an optimizer step."""
        for slot in self.ring:
            if slot.stream is not None:
                slot.stream.wait_stream(torch.cuda.current_stream(slot.buffer.device))

    def rejoin(self) -> None:
        """Makes the current stream wait for all slots, so that the next optimizer step begins after them."""
        for slot in self.ring:
            if slot.stream is not None:
                torch.cuda.current_stream(slot.buffer.device).wait_stream(slot.stream)


def wait_until(done: Callable[[], bool], what: str, seconds: float, watch: Callable[[], None]) -> None:
    """Waits on the host, without holding up a stream.

    Args:
        done: whether the wait is over; called again and again.
        what: the thing that is waited for, for the error message.
        seconds: longest wait.
        watch: called now and then; raises if there is no use in waiting any longer.

    Raises:
        WeightSyncError: it took too long.
    """
    started = time.monotonic()
    next_watch = started + WATCH_SECONDS
    while not done():
        now = time.monotonic()
        if now >= next_watch:
            watch()
            next_watch = now + WATCH_SECONDS
        if now - started > seconds:
            raise WeightSyncError(
                f"{what} took longer than weight_sync.timeout={seconds:g} s: raise it, or find out why"
            )
        time.sleep(POLL_SECONDS)


def in_time(work: Callable[[], T], what: str, seconds: float, watch: Callable[[], None]) -> T:
    """Does work that cannot be interrupted, in a thread that is abandoned if the work takes too long.

    Args:
        work: the function to call.
        what: a name for the work, for the error message.
        seconds: longest time that it may take.
        watch: called now and then; raises if there is no use in waiting any longer.

    Raises:
        WeightSyncError: it took too long.
        Exception: what `work` raised.
    """
    result = in_thread(work, what)
    wait_until(result.done, what, seconds, watch)
    return result.result()
