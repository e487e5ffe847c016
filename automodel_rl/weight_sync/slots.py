"""Buffers that are filled and emptied in turn, each on a stream of its own, so that the steps of a sync overlap."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from automodel_rl.errors import WeightSyncError

T = TypeVar("T")

TURNS_AHEAD = 4
"""Turns of a slot that may be queued on its stream."""

POLL_SECONDS = 5e-5
WATCH_SECONDS = 0.1


class Slot:
    """A buffer and its stream (on the CPU there is none, and everything happens at once).

    Args:
        number: its place among all.
        buffer: uint8.

    Attributes:
        targets: where in the buffer the buckets are written that are filled into it.
    """

    def __init__(self, number: int, buffer: Tensor):
        self.number, self.buffer = number, buffer
        self.targets: dict[int, list[Tensor]] = {}
        self.stream = torch.cuda.Stream(buffer.device) if buffer.is_cuda else None
        self._uses: deque[torch.cuda.Event] = deque()

    def active(self) -> AbstractContextManager[None]:
        """Within this block work is queued on the slot's stream."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> None:
        """Notes that all work of this turn is queued."""
        if self.stream is not None:
            self.has_room()  # lets go of those that have ended
            self._uses.append(self.stream.record_event())

    def has_room(self) -> bool:
        """Whether another turn may be queued. The stream keeps turns in order; this keeps their number small, so that
        the host sees within a few turns that a peer no longer answers. Asks, and does not wait."""
        while self._uses and self._uses[0].query():
            self._uses.popleft()
        return len(self._uses) < TURNS_AHEAD

    def is_done(self) -> bool:
        """Whether the work of all turns has ended. Asks, and does not wait."""
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
        """With buffers of this process alone."""
        return cls([torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)])

    def __getitem__(self, turn: int) -> Slot:
        """The slot whose turn it is."""
        return self.ring[turn % len(self.ring)]

    def __len__(self) -> int:
        return len(self.ring)

    def join(self) -> None:
        """All slots begin after what is queued on the current stream, such as an optimizer step."""
        for slot in self.ring:
            if slot.stream is not None:
                slot.stream.wait_stream(torch.cuda.current_stream(slot.buffer.device))

    def rejoin(self) -> None:
        """What the current stream does next, such as the next optimizer step, begins after all slots."""
        for slot in self.ring:
            if slot.stream is not None:
                torch.cuda.current_stream(slot.buffer.device).wait_stream(slot.stream)


def wait_until(done: Callable[[], bool], what: str, seconds: float, watch: Callable[[], None]) -> None:
    """Waits on the host, without holding up a stream.

    Args:
        done: asked again and again.
        what: that is waited for, for the message.
        seconds: at most.
        watch: raises if there is no use in waiting any longer; asked now and then.

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
    """Does work that cannot be told to stop waiting for others, in a thread that is left to itself if it must be.

    Args:
        work: is called.
        what: it is, for the message.
        seconds: it may take.
        watch: raises if there is no use in waiting any longer.

    Raises:
        WeightSyncError: it took too long.
        Exception: what `work` raised.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    threading.Thread(target=run, daemon=True, name=what).start()
    wait_until(lambda: bool(results or errors), what, seconds, watch)
    if errors:
        raise errors[0]
    return results[0]
