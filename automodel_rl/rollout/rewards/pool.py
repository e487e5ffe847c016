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

LOOK_SECONDS, SLOT_POLL_SECONDS = 0.5, 0.02
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
    """One call, or the calls of a batch. `is_exclusive`: no other call may run beside it in its process."""

    completions: list[str]
    examples: list[dict[str, Any]]
    results: "Future[list[Result]]" = field(default_factory=Future)
    is_exclusive: bool = False


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
            threading.Thread(target=self._work, args=(index,), daemon=True, name=f"{config.function} {index}")
            for index in range(config.workers)
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

    def _work(self, index: int) -> None:
        """Serves one process until the pool is closed."""
        room = self.config.concurrency if self._is_async else 1
        with contextlib.suppress(InputError):  # reported by its first call
            self._processes[index] = self._processes[index] or _Process(self.config)
        held: _Call | None = None  # must run alone: waits until the process is idle
        while not self._is_closed:
            while len(self._running(index)) < room and not self._runs_exclusive_call(index):
                call = held or self._next(wait=not self._running(index))
                held = call if call and call.is_exclusive and self._running(index) else None
                if call is None or held:
                    break
                self._start(index, call)
            if self._running(index):
                self._take_result(index, SLOT_POLL_SECONDS if len(self._running(index)) < room else LOOK_SECONDS)

    def _running(self, index: int) -> dict[int, tuple[_Call, float]]:
        process = self._processes[index]
        return {} if process is None else process.running

    def _runs_exclusive_call(self, index: int) -> bool:
        return any(call.is_exclusive for call, _ in self._running(index).values())

    def _next(self, wait: bool) -> _Call | None:
        try:
            return self._calls.get(block=wait)
        except queue.Empty:
            return None

    def _start(self, index: int, call: _Call) -> None:
        try:
            process = self._processes[index]
            if process is None:
                process = self._processes[index] = _Process(self.config)
            process.send(call)
        except (ChildEndedError, InputError) as problem:
            self._end_failed(index, str(problem), [call])

    def _take_result(self, index: int, seconds: float) -> None:
        process = self._processes[index]
        assert process is not None
        try:
            waited = process.take_result(seconds)
        except TimeoutError:
            blocking = "" if not self._is_async else ", and blocked concurrent calls"
            self._end_failed(index, f"took longer than time_limit={self.config.time_limit} s{blocking}")
        except ChildEndedError as problem:
            self._end_failed(index, str(problem))
        else:
            if waited is not None:
                self._retry([waited], f"blocked its process for longer than time_limit={self.config.time_limit} s")

    def _end_failed(self, index: int, error: str, calls: Sequence[_Call] = ()) -> None:
        """Ends a process that has failed, and retries its calls and `calls`, which could not be sent to it."""
        running = [call for call, _ in self._running(index).values()]
        self._end(index)
        self._retry(list(dict.fromkeys([*running, *calls])), error)

    def _retry(self, calls: Sequence[_Call], error: str) -> None:
        """Retries calls, each alone, as any of those that ran together may have caused the failure. A call that was
        alone has failed."""
        for call in calls:
            if call.is_exclusive or (len(calls) == 1 and not self._is_async):
                of_completion = f" (completion {call.completions[0]!r:.80})" if len(call.completions) == 1 else ""
                score = score_on_error(self.config, caused_by_completion=False)
                call.results.set_result([Result(score, error + of_completion)] * len(call.completions))
            else:
                self._calls.put(dataclasses.replace(call, is_exclusive=True))

    def _end(self, index: int) -> None:
        process, self._processes[index] = self._processes[index], None
        if process is not None:
            process.close()


def score_on_error(config: RewardConfig, caused_by_completion: bool) -> float:
    """Returns the score of a failed call, nan to exclude its completion. `caused_by_completion`: the completion caused
    the error."""
    if isinstance(config.on_error, str):
        return 0.0 if config.on_error == "auto" and caused_by_completion else math.nan
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
            score = score_on_error(self.config, caused_by_completion=score is None)
        assert score is not None
        return Result(score, error, metrics)

    def close(self) -> None:
        self.child.close()
