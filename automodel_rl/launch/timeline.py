"""Who works when in a step: the phases of the trainer, and the completions that generators write and rewards score
meanwhile."""

import threading
import time
from collections import defaultdict
from typing import Any

TRAINER, REWARDS = "trainer", "rewards"


def _order(lane: str) -> tuple[int, int]:
    """The trainer comes first, then rewards, then generators by their numbers."""
    number = lane.rpartition(" ")[2]
    place = (TRAINER, REWARDS).index(lane) if lane in (TRAINER, REWARDS) else 2
    return place, int(number) if number.isdecimal() else -1


class StepTimeline:
    """Collects spans of work from any thread, each in a lane. Times are those of `time.time()`."""

    def __init__(self) -> None:
        self._adding = threading.Lock()
        self._spans: defaultdict[str, list[tuple[float, float, str]]] = defaultdict(list)

    def add(self, lane: str, started: float, name: str = "") -> None:
        """Adds a span that ends now.

        Args:
            lane: who worked.
            started: when it began.
            name: the phase of the trainer; empty for completions.
        """
        with self._adding:
            self._spans[lane].append((started, time.time(), name))

    def take(self, zero: float) -> list[dict[str, Any]]:
        """The lanes of all spans since the last call: name, spans as pairs of seconds after `zero` (which may be
        negative), and, of the trainer, the names of the spans."""
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
