"""Timeline of a step: the trainer's phases, and when generators write completions and rewards score them."""

import threading
import time
from collections import defaultdict
from typing import Any

TRAINER, REWARDS = "trainer", "rewards"


def _order(lane: str) -> tuple[int, int]:
    """Sort key: the trainer first, then rewards, then generators by number."""
    number = lane.rpartition(" ")[2]
    place = (TRAINER, REWARDS).index(lane) if lane in (TRAINER, REWARDS) else 2
    return place, int(number) if number.isdecimal() else -1


class StepTimeline:
    """Thread-safe collection of work spans, grouped in lanes. Times are those of `time.time()`."""

    def __init__(self) -> None:
        self._adding = threading.Lock()
        self._spans: defaultdict[str, list[tuple[float, float, str]]] = defaultdict(list)

    def add(self, lane: str, started: float, name: str = "") -> None:
        """Adds a span that ends now.

        Args:
            lane: the worker.
            name: the trainer's phase; empty for completions.
        """
        with self._adding:
            self._spans[lane].append((started, time.time(), name))

    def take(self, zero: float) -> list[dict[str, Any]]:
        """Returns and clears all lanes: the name, [start, end] pairs in seconds after `zero` (may be negative), and
        for the trainer the phase names."""
        with self._adding:
            spans, self._spans = self._spans, defaultdict(list)
        return [
            {
                "lane": lane,
                "spans": [[round(start - zero, 3), round(end - zero, 3)] for start, end, _ in of_lane],
                **({"names": [name for _, _, name in of_lane]} if lane == TRAINER else {}),
            }
            for lane, of_lane in sorted(spans.items(), key=lambda item: _order(item[0]))
        ]
