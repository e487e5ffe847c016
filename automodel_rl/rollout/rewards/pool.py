"""The processes of one reward: they take calls from a queue, as many at once as there is room for."""

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from automodel_rl.config import RewardConfig
from automodel_rl.errors import InputError
from automodel_rl.rollout.child_process import ChildEndedError, ChildProcess
from automodel_rl.rollout.rewards.worker import ASYNC, BATCH

START_SECONDS = 120.0
"""Time limit for importing a reward function's module."""

GRACE_SECONDS = 5.0
"""Seconds that a process of async calls may be late. It ends its calls itself, unless one of them blocks it."""

LOOK_SECONDS, ROOM_SECONDS = 0.5, 0.02
"""Seconds between two looks whether the pool is closed, and for more calls while a process has room for some."""


@dataclass(frozen=True)
class Result:
    """What a call gave.

    Attributes:
        score: the score; `on_error` if the call failed.
        error: why the call failed; empty if it went well.
        metrics: further numbers that the function returned, by name, and its text `answer`.
    """

    score: float
    error: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call, or the calls of a batch. `results` gets a `Result` for each of them."""

    completions: list[str]
    examples: list[dict[str, Any]]
    results: "Future[list[Result]]" = field(default_factory=Future)


class RewardPool:
    """Runs one reward in processes of its own. A process whose call runs out of time is ended, and another is started.

    Args:
        config: the reward.

    Attributes:
        takes_batches: whether the function takes lists of completions.

    Raises:
        InputError: the function cannot be imported or called.
    """

    def __init__(self, config: RewardConfig):
        self.config = config
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._is_closed = False
        first = _Process(config)
        self.takes_batches, self._is_async = first.kind == BATCH, first.kind == ASYNC
        self._processes: list[_Process | None] = [first, *[None] * (config.workers - 1)]
        self._threads = [
            threading.Thread(target=self._work, args=(place,), daemon=True, name=f"{config.function} {place}")
            for place in range(config.workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, completions: Sequence[str], examples: Sequence[dict[str, Any]]) -> "Future[list[Result]]":
        """Queues a call: one completion with its example or, if the function takes batches, several."""
        call = _Call(list(completions), list(examples))
        self._calls.put(call)
        return call.results

    def close(self) -> None:
        """Ends the processes. Calls that have not finished get no result."""
        self._is_closed = True
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            if process is not None:
                process.close()

    def _work(self, place: int) -> None:
        """Serves one process: gives it calls and takes its results, until the pool is closed."""
        room = self.config.concurrency if self._is_async else 1
        with contextlib.suppress(InputError):  # then its first call says so
            self._processes[place] = self._processes[place] or _Process(self.config)
        while not self._is_closed:
            while len(self._running(place)) < room:
                call = self._next(wait=not self._running(place))
                if call is None:
                    break
                self._start(place, call)
            if self._running(place):
                self._take_result(place, ROOM_SECONDS if len(self._running(place)) < room else LOOK_SECONDS)

    def _running(self, place: int) -> dict[int, tuple[_Call, float]]:
        process = self._processes[place]
        return {} if process is None else process.running

    def _next(self, wait: bool) -> _Call | None:
        """The next call, or None if there is none now or the pool is closed."""
        try:
            return self._calls.get(block=wait)
        except queue.Empty:
            return None

    def _start(self, place: int, call: _Call) -> None:
        try:
            process = self._processes[place]
            if process is None:
                process = self._processes[place] = _Process(self.config)
            process.send(call)
        except (ChildEndedError, InputError) as problem:
            self._fail([call], str(problem))
            self._end(place)

    def _take_result(self, place: int, seconds: float) -> None:
        process = self._processes[place]
        assert process is not None
        try:
            process.take_result(seconds)
        except TimeoutError:
            late = [call for call, deadline in process.running.values() if time.monotonic() >= deadline]
            self._fail(late, f"took longer than time_limit={self.config.time_limit} s")
            for call, _ in process.running.values():  # those that waited for the late one run again
                if not call.results.done():
                    self._calls.put(call)
            self._end(place)
        except ChildEndedError as problem:
            self._fail([call for call, _ in process.running.values()], str(problem))
            self._end(place)

    def _fail(self, calls: Sequence[_Call], error: str) -> None:
        for call in calls:
            call.results.set_result([Result(self.config.on_error, error)] * len(call.completions))

    def _end(self, place: int) -> None:
        process, self._processes[place] = self._processes[place], None
        if process is not None:
            process.close()


class _Process:
    """One process of a reward.

    Attributes:
        kind: how the function is called, one of the worker's kinds.
        running: the calls that it works on, each with its deadline.
    """

    def __init__(self, config: RewardConfig):
        self.config, self.count = config, 0
        self.running: dict[int, tuple[_Call, float]] = {}
        self.child = ChildProcess([sys.executable, "-m", "automodel_rl.rollout.rewards.worker", config.function])
        try:
            self.child.send((config.options, config.time_limit))
            self.kind, error = self.child.receive(START_SECONDS)
        except (ChildEndedError, TimeoutError):
            error = f"rewards.function={config.function}: its process does not start: import it to see why"
        if error:
            self.child.close()
            raise InputError(error)

    def send(self, call: _Call) -> None:
        self.count += 1
        limit = self.config.time_limit + (GRACE_SECONDS if self.kind == ASYNC else 0.0)
        self.running[self.count] = (call, time.monotonic() + limit)
        self.child.send((self.count, call.completions, call.examples))

    def take_result(self, seconds: float) -> None:
        """Waits for a result for at most `seconds`.

        Raises:
            TimeoutError: a call has run out of time.
            ChildEndedError: the process is gone.
        """
        left = max(0.0, min(deadline for _, deadline in self.running.values()) - time.monotonic())
        try:
            number, results = self.child.receive(min(left, seconds))
        except TimeoutError:
            if left <= seconds:
                raise
            return
        call, _ = self.running.pop(number)
        call.results.set_result(
            [Result(self.config.on_error if score is None else score, error, m) for score, error, m in results]
        )

    def close(self) -> None:
        self.child.close()
