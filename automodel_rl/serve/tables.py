"""What the server knows of its clients: sessions, training runs, and weights to sample from."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from automodel_rl.serve.messages import RunShape
from automodel_rl.serve.saved_weights import Saved


class UnknownError(Exception):
    """A request names something that is not there."""


class BusyError(Exception):
    """There is no room for a request now."""


WINDOW_SECONDS = 60.0


class Throughput:
    """Counts tokens, and says how many come in a second."""

    def __init__(self) -> None:
        self.total = 0
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, count: int) -> None:
        """Counts tokens that are done now."""
        self.total += count
        self._recent.append((time.monotonic(), count))

    @property
    def per_second(self) -> float:
        """Tokens of a second, over the last minute."""
        oldest = time.monotonic() - WINDOW_SECONDS
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
        return sum(count for _, count in self._recent) / WINDOW_SECONDS


@dataclass
class Session:
    """A client.

    Attributes:
        seen: when it last gave a sign, by the monotonic clock.
        created: when it began, by the same clock.
        user_metadata, display_name: what the client said of it.
    """

    seen: float
    created: float = field(default_factory=time.monotonic)
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


@dataclass
class ServedRun:
    """A training run.

    Attributes:
        session: the session it belongs to.
        shape: what it trains.
        user_metadata: what its client said of it.
        next: the number of the request whose turn it is.
        waiting: requests that came before their turn, by number.
        since: since when the first of them waits.
        lost: why the run cannot go on; empty if it can.
        kept: names of its weights that are kept to sample from, oldest first.
        used: when it was last used.
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
    """Weights to sample from: kept under a name, or saved, or those of a teacher, or else of the base model."""

    kept: str | None = None
    saved: Saved | None = None
    teacher: str | None = None


def choose_rows(runs: Iterable[ServedRun], rank: int, largest: int) -> int:
    """The first of so many rows of the model's adapters that no run has or, if there are not so many, whose runs were
    used longest ago.

    Args:
        runs: the other runs.
        rank: number of rows.
        largest: number of rows of the model's adapters.
    """
    others = [*runs]
    starts = [0, *(run.shape.rows.stop for run in others if run.shape.rows.stop + rank <= largest)]

    def newest(first: int) -> float:
        used = [run.used for run in others if run.shape.first < first + rank and first < run.shape.rows.stop]
        return max(used, default=0.0)

    return min(sorted(starts), key=newest)
