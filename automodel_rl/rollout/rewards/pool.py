"""Processes of one reward. They take calls from a queue, as many at a time as they have capacity for."""

import contextlib
import dataclasses
import math
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
from automodel_rl.generators.child_process import ChildEndedError, ChildProcess
from automodel_rl.rollout.rewards.worker import ASYNC, BATCH

START_SECONDS = 120.0
"""Timeout for importing a reward function's module."""

GRACE_SECONDS = 5.0
"""Extra time of a process of async calls. It ends late calls itself, unless one of them blocks it."""

LOOK_SECONDS, ROOM_SECONDS = 0.5, 0.02
"""Polling intervals: for the closing of the pool, and for more calls while a process has capacity."""


@dataclass(frozen=True)
class Result:
    """Result of a call.

    Attributes:
        score: that of `on_error` if the call failed; nan for none.
        error: empty on success.
        metrics: further numbers that the function returned, and its text `answer`.
    """

    score: float
    error: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call, or the calls of a batch. `is_alone`: no other call may run beside it in its process."""

    completions: list[str]
    examples: list[dict[str, Any]]
    results: "Future[list[Result]]" = field(default_factory=Future)
    is_alone: bool = False


class RewardPool:
    """Runs one reward in its own processes. A process whose call times out is replaced.

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
        """Queues a call for one completion or, if the function takes batches, for several."""
        call = _Call(list(completions), list(examples))
        self._calls.put(call)
        return call.results

    def close(self) -> None:
        """Ends the processes. Unfinished calls get no result."""
        self._is_closed = True
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            if process is not None:
                process.close()

    def _work(self, place: int) -> None:
        """Serves one process until the pool is closed."""
        room = self.config.concurrency if self._is_async else 1
        with contextlib.suppress(InputError):  # reported by its first call
            self._processes[place] = self._processes[place] or _Process(self.config)
        held: _Call | None = None  # must run alone: waits until the process is idle
        while not self._is_closed:
            while len(self._running(place)) < room and not self._runs_one_alone(place):
                call = held or self._next(wait=not self._running(place))
                held = call if call and call.is_alone and self._running(place) else None
                if call is None or held:
                    break
                self._start(place, call)
            if self._running(place):
                self._take_result(place, ROOM_SECONDS if len(self._running(place)) < room else LOOK_SECONDS)

    def _running(self, place: int) -> dict[int, tuple[_Call, float]]:
        process = self._processes[place]
        return {} if process is None else process.running

    def _runs_one_alone(self, place: int) -> bool:
        return any(call.is_alone for call, _ in self._running(place).values())

    def _next(self, wait: bool) -> _Call | None:
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
            self._lose(place, str(problem), [call])

    def _take_result(self, place: int, seconds: float) -> None:
        process = self._processes[place]
        assert process is not None
        try:
            waited = process.take_result(seconds)
        except TimeoutError:
            blocking = "" if not self._is_async else ", and blocked concurrent calls"
            self._lose(place, f"took longer than time_limit={self.config.time_limit} s{blocking}")
        except ChildEndedError as problem:
            self._lose(place, str(problem))
        else:
            if waited is not None:
                self._call_again([waited], f"blocked its process for longer than time_limit={self.config.time_limit} s")

    def _lose(self, place: int, error: str, calls: Sequence[_Call] = ()) -> None:
        """Ends a process that has failed, and retries its calls and `calls`, which could not be sent to it."""
        running = [call for call, _ in self._running(place).values()]
        self._end(place)
        self._call_again(list(dict.fromkeys([*running, *calls])), error)

    def _call_again(self, calls: Sequence[_Call], error: str) -> None:
        """Retries calls, each alone, as any of those that ran together may have caused the failure. A call that was
        alone has failed."""
        for call in calls:
            if call.is_alone or (len(calls) == 1 and not self._is_async):
                of_completion = f" (completion {call.completions[0]!r:.80})" if len(call.completions) == 1 else ""
                score = scored_on_error(self.config, is_of_completion=False)
                call.results.set_result([Result(score, error + of_completion)] * len(call.completions))
            else:
                self._calls.put(dataclasses.replace(call, is_alone=True))

    def _end(self, place: int) -> None:
        process, self._processes[place] = self._processes[place], None
        if process is not None:
            process.close()


def scored_on_error(config: RewardConfig, is_of_completion: bool) -> float:
    """Returns the score of a failed call, nan to exclude its completion. `is_of_completion`: the completion caused the
    error."""
    if isinstance(config.on_error, str):
        return 0.0 if config.on_error == "auto" and is_of_completion else math.nan
    return config.on_error


class _Process:
    def __init__(self, config: RewardConfig):
        self.config, self.count = config, 0
        self.running: dict[int, tuple[_Call, float]] = {}
        self.child = ChildProcess([sys.executable, "-m", "automodel_rl.rollout.rewards.worker", config.function])
        try:
            self.child.send((config.options, config.time_limit))
            self.kind, error = self.child.receive(START_SECONDS)
        except (ChildEndedError, TimeoutError):
            error = f"rewards.function={config.function}: its process failed to start: import it to see why"
        if error:
            self.child.close()
            raise InputError(error)

    def send(self, call: _Call) -> None:
        self.count += 1
        limit = self.config.time_limit + (GRACE_SECONDS if self.kind == ASYNC else 0.0)
        self.running[self.count] = (call, time.monotonic() + limit)
        self.child.send((self.count, call.completions, call.examples))

    def take_result(self, seconds: float) -> _Call | None:
        """Waits at most `seconds` for a result. Returns a call that timed out because another one blocked the process,
        if any.

        Raises:
            TimeoutError: a call has timed out.
            ChildEndedError: the process has exited.
        """
        left = max(0.0, min(deadline for _, deadline in self.running.values()) - time.monotonic())
        try:
            number, results = self.child.receive(min(left, seconds))
        except TimeoutError:
            if left <= seconds:
                raise
            return None
        call, _ = self.running.pop(number)
        if results is None:
            return call
        call.results.set_result([self._result(*result) for result in results])
        return None

    def _result(self, score: float | None, error: str, metrics: dict[str, Any]) -> Result:
        if error:
            score = scored_on_error(self.config, is_of_completion=score is None)
        assert score is not None
        return Result(score, error, metrics)

    def close(self) -> None:
        self.child.close()
