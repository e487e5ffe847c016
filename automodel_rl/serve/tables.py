"""The server's records: sessions, training runs, and weights to sample from."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from automodel_rl.serve.messages import RunShape
from automodel_rl.serve.saved_weights import Saved


class UnknownError(Exception):
    """A request names something that does not exist."""


class BusyError(Exception):
    """There is no room for a request at the moment."""


WINDOW_SECONDS = 60.0


class Throughput:
    """Token counter with a rate."""

    def __init__(self) -> None:
        self.total = 0
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, count: int) -> None:
        self.total += count
        self._recent.append((time.monotonic(), count))

    @property
    def per_second(self) -> float:
        oldest = time.monotonic() - WINDOW_SECONDS
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
        return sum(count for _, count in self._recent) / WINDOW_SECONDS


@dataclass
class Session:
    """A client.

    Attributes:
        seen, created: `time.monotonic()` of its last request and of its start.
        user_metadata, display_name: as given by the client.
    """

    seen: float
    created: float = field(default_factory=time.monotonic)
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


@dataclass
class ServedRun:
    """A training run.

    Attributes:
        user_metadata: as given by the client.
        next: number of the request whose turn it is.
        waiting: requests that arrived before their turn, by number.
        since: `time.monotonic()` since which the next request has been missing.
        lost: why the run cannot continue; empty if it can.
        kept: names of its weights kept for sampling, oldest first.
        used: `time.time()` of its last use.
    """

    session: str
    shape: RunShape
    user_metadata: dict[str, Any] | None
    next: int = 1
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)
    since: float = 0.0
    lost: str = ""
    kept: deque[str] = field(default_factory=deque)
    used: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Weights:
    """Weights to sample from: kept under a name, saved, a teacher's, or else the base model's."""

    kept: str | None = None
    saved: Saved | None = None
    teacher: str | None = None


def choose_rows(runs: Iterable[ServedRun], rank: int, largest: int) -> int:
    """Returns the first of `rank` consecutive adapter rows that no run uses or, if there are none, whose runs were
    used longest ago. The model's adapters have `largest` rows."""
    others = [*runs]
    starts = [0, *(run.shape.rows.stop for run in others if run.shape.rows.stop + rank <= largest)]

    def newest(first: int) -> float:
        used = [run.used for run in others if run.shape.first < first + rank and first < run.shape.rows.stop]
        return max(used, default=0.0)

    return min(sorted(starts), key=newest)
