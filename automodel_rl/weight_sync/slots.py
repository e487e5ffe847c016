"""Ring of buffers, each with its own CUDA stream, so that the steps of a weight sync overlap."""

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
"""Most turns queued on the stream of a slot."""

POLL_SECONDS = 5e-5
WATCH_SECONDS = 0.1


class Slot:
    """A buffer (uint8) and its stream; none on the CPU, where work runs at once.

    Attributes:
        number: index in the ring.
        targets: by (sender, bucket): views of the buffer for the bucket's tensors.
    """

    def __init__(self, number: int, buffer: Tensor):
        self.number, self.buffer = number, buffer
        self.targets: dict[tuple[int, int], list[Tensor]] = {}
        self.stream = torch.cuda.Stream(buffer.device) if buffer.is_cuda else None
        self._uses: deque[torch.cuda.Event] = deque()

    def active(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> None:
        if self.stream is not None:
            self.has_room()  # drops the events of turns that have ended
            self._uses.append(self.stream.record_event())

    def has_room(self) -> bool:
        """Returns whether another turn may be queued. The number of turns is limited so that the host soon sees that a
        peer no longer answers."""
        while self._uses and self._uses[0].query():
            self._uses.popleft()
        return len(self._uses) < TURNS_AHEAD

    def is_done(self) -> bool:
        return self.has_room() and not self._uses


class Slots:
    def __init__(self, buffers: list[Tensor]):
        self.ring = [Slot(number, buffer) for number, buffer in enumerate(buffers)]

    @classmethod
    def allocate(cls, num_bytes: int, count: int, device: torch.device) -> "Slots":
        return cls([torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)])

    def __getitem__(self, turn: int) -> Slot:
        return self.ring[turn % len(self.ring)]

    def __len__(self) -> int:
        return len(self.ring)

    def fork_streams(self) -> None:
        """Makes all slots wait for the work queued on the current stream, such as an optimizer step."""
        for slot in self.ring:
            if slot.stream is not None:
                slot.stream.wait_stream(torch.cuda.current_stream(slot.buffer.device))

    def join_streams(self) -> None:
        """Makes the current stream wait for all slots, so that the next optimizer step starts after them."""
        for slot in self.ring:
            if slot.stream is not None:
                torch.cuda.current_stream(slot.buffer.device).wait_stream(slot.stream)


def wait_until(done: Callable[[], bool], what: str, seconds: float, watch: Callable[[], None]) -> None:
    """Polls on the host until `done` returns true, without blocking a stream.

    Args:
        what: the awaited thing, for the error message.
        watch: called every `WATCH_SECONDS`; raises if waiting is pointless.

    Raises:
        WeightSyncError: it took longer than `seconds`.
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
    """Calls `work`, which cannot be interrupted, in a thread that is abandoned at the timeout. See `wait_until`."""
    result = in_thread(work, what)
    wait_until(result.done, what, seconds, watch)
    return result.result()
