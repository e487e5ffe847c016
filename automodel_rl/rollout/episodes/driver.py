"""Drives episodes: conversations advance on their own, and environments run while the generator writes."""

import functools
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from automodel_rl.errors import innermost
from automodel_rl.generator_messages import Request
from automodel_rl.rollout.episodes.episode import Episode, Limits, TurnCodec
from automodel_rl.rollout.episodes.protocol import Environment, Outcome, Turn
from automodel_rl.rollout.protocol import Completion, Generator, OnFinished, do_nothing

MakeEnvironment = Callable[[int], Environment]
"""Makes the environment of the episode at a place."""


@dataclass
class _Running:
    """An episode under way.

    Attributes:
        place: its place among the requests.
        episode: its state.
        environment: its world; None until its first turn is written.
        error: why it failed; empty if it did not.
    """

    place: int
    episode: Episode
    environment: Environment | None = None
    error: str = ""


@dataclass(frozen=True)
class _Written:
    """A turn that the generator wrote."""

    running: _Running
    completion: Completion


@dataclass(frozen=True)
class _Stepped:
    """What an environment answered, or why it did not."""

    running: _Running
    outcome: Outcome = field(default_factory=Outcome)
    error: str = ""


class EpisodeDriver:
    """Writes episodes with a generator that writes single turns.

    Args:
        codec: reads turns and writes what is between them.
        limits: when an episode ends at the latest.
        num_threads: number of environments that run at the same time.
    """

    def __init__(self, codec: TurnCodec, limits: Limits, num_threads: int):
        self.codec, self.limits = codec, limits
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="environment")

    def close(self) -> None:
        """Ends the threads of environments, once their calls have returned."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def submit(
        self,
        generator: Generator,
        requests: Sequence[Request],
        make_environment: MakeEnvironment,
        on_finished: OnFinished = do_nothing,
    ) -> Callable[[], list[Completion]]:
        """Begins episodes, each with a request for its first turn.

        Args:
            generator: writes the turns.
            requests: the requests.
            make_environment: makes the environment of an episode.
            on_finished: called for every episode as soon as it has ended.

        Returns:
            A function that drives the episodes to their ends. It returns them in order, as completions whose `sampled`
            says which tokens the generator wrote. It raises what the generator raises.
        """
        running = [_Running(place, Episode(request, self.codec, self.limits)) for place, request in enumerate(requests)]
        work = _Work(self, generator, make_environment, on_finished)
        if generator.works_alone:
            work.ask(running)
            running = []
        return functools.partial(work.finish, running, len(requests))


class _Work:
    """The episodes of one call of `submit`."""

    def __init__(
        self, driver: EpisodeDriver, generator: Generator, make_environment: MakeEnvironment, on_finished: OnFinished
    ):
        self.driver, self.generator = driver, generator
        self.make_environment, self.on_finished = make_environment, on_finished
        self.news: queue.SimpleQueue[_Written | _Stepped | BaseException] = queue.SimpleQueue()
        self.waits: list[Callable[[], list[Completion]]] = []
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="generator")
        self.stepping = 0
        self.done: dict[int, Completion] = {}

    def ask(self, ready: Sequence[_Running]) -> None:
        """Lets the generator write the next turn of episodes."""

        def written(number: int, completion: Completion) -> None:
            self.news.put(_Written(ready[number], completion))

        wait = self.generator.submit([running.episode.request for running in ready], written)
        if self.generator.works_alone:
            self._watcher.submit(wait).add_done_callback(self._watched)
        else:
            self.waits.append(wait)

    def finish(self, ready: list[_Running], count: int) -> list[Completion]:
        """Drives the episodes to their ends."""
        try:
            while len(self.done) < count:
                # A generator that writes when waited for writes all that are ready at once.
                if ready and (self.generator.works_alone or not self.stepping):
                    self.ask(ready)
                    ready = []
                while self.waits:
                    self.waits.pop()()
                ready += self._next_ready()
        finally:
            self._watcher.shutdown(wait=False, cancel_futures=True)
        return [self.done[place] for place in range(count)]

    def _watched(self, future: "Future[list[Completion]]") -> None:
        """Tells of a generator that is lost, whose completions will never come."""
        if not future.cancelled() and (error := future.exception()) is not None:
            self.news.put(error)

    def _next_ready(self) -> list[_Running]:
        """Handles what comes next. Returns the episodes that are ready for another turn."""
        match self.news.get():
            case _Written(running, completion):
                self._take(running, completion)
            case _Stepped(running, outcome, error):
                self.stepping -= 1
                running.error = error
                if not error:
                    running.episode.answer(outcome)
                    if not running.episode.reason:
                        return [running]
                self._end(running)
            case BaseException() as lost:
                raise lost
        return []

    def _take(self, running: _Running, completion: Completion) -> None:
        if completion.finish == "error":
            running.error = completion.error
            self._end(running)
            return
        turn = running.episode.take(completion)
        self.stepping += 1
        self.driver._threads.submit(self._step, running, turn).add_done_callback(self._stepped)

    def _step(self, running: _Running, turn: Turn) -> _Stepped:
        try:
            if running.environment is None:
                running.environment = self.make_environment(running.place)
            return _Stepped(running, running.environment.step(turn))
        except Exception as error:
            return _Stepped(running, error=innermost(error))

    def _stepped(self, future: "Future[_Stepped]") -> None:
        self.news.put(future.result())

    def _end(self, running: _Running) -> None:
        if running.environment is not None:
            running.environment.close()
        completion = running.episode.transcript.completion(running.error)
        self.done[running.place] = completion
        self.on_finished(running.place, completion)
