"""Runs episodes concurrently: environments work while the generator writes."""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from automodel_rl.errors import describe_root_cause
from automodel_rl.generators.protocol import Completion, Generator, fail_unfinished
from automodel_rl.launch.background import in_thread
from automodel_rl.rollout.episodes.episode import ENVIRONMENT_ERRORS, Episode
from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn

SLOT_POLL_SECONDS = 0.1
"""Seconds between checks whether more episodes may begin."""


@dataclass(frozen=True)
class _TurnGenerated:
    """A turn that the generator wrote, or its failure."""

    index: int
    completion: "Future[Completion]"


@dataclass(frozen=True)
class _EnvironmentReturned:
    """The messages of an environment's reset, or the outcome of a step, or an error. `seconds` is its duration."""

    index: int
    answer: Sequence[Message] | Outcome = ()
    error: str = ""
    seconds: float = 0.0


class EpisodeDriver:
    """Writes episodes, turn by turn, with a generator. At most `max_concurrent` episodes run at a time, over
    all calls of `submit`."""

    def __init__(self, max_concurrent: int):
        self._slots = threading.Semaphore(max_concurrent)
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="environment")

    def close(self) -> None:
        """Ends the threads of environments once their current calls return."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def submit(self, generator: Generator, episodes: Sequence[Episode]) -> "list[Future[Completion]]":
        """Begins episodes, or resumes them after a generator was lost, in a thread.

        A generator that does not work alone gets all ready turns as one batch once all environments have answered.

        Returns:
            A future per episode. It raises the generator's error, once all environments have answered.
        """
        work = _Work(generator, episodes, self._threads, self._slots)
        in_thread(work.drive, "episodes")
        return work.completions


@dataclass
class _Work:
    """The episodes of one call of `submit`.

    Attributes:
        events: events of the generator and the environments.
        ready: indices of episodes whose next turn can be written.
        num_started: number of episodes begun, in order.
        writing, acting: numbers of turns being written, and of environments at work.
        num_finished: number of finished episodes.
    """

    generator: Generator
    episodes: Sequence[Episode]
    threads: ThreadPoolExecutor
    slots: threading.Semaphore
    events: "queue.SimpleQueue[_TurnGenerated | _EnvironmentReturned]" = field(default_factory=queue.SimpleQueue)
    ready: list[int] = field(default_factory=list)
    num_started: int = 0
    writing: int = 0
    acting: int = 0
    num_finished: int = 0

    def __post_init__(self) -> None:
        self.completions: list[Future[Completion]] = [Future() for _ in self.episodes]

    def drive(self) -> None:
        """Handles events until all episodes are over. An error fails the remaining ones."""
        try:
            while self.num_finished < len(self.episodes):
                self._begin()
                if self.ready and (self.generator.writes_in_background or not (self.acting or self.writing)):
                    self._ask()
                if self.num_finished < len(self.episodes):
                    with contextlib.suppress(queue.Empty):  # another `submit` may have made room
                        self._handle(
                            self.events.get(
                                timeout=None if self.num_started == len(self.episodes) else SLOT_POLL_SECONDS
                            )
                        )
        except BaseException as error:
            self._end_calls()
            for _ in range(self.num_started - self.num_finished):
                self.slots.release()
            fail_unfinished(self.completions, error)

    def _begin(self) -> None:
        """Begins as many episodes as the limit allows."""
        while self.num_started < len(self.episodes) and self.slots.acquire(blocking=False):
            index, episode = self.num_started, self.episodes[self.num_started]
            self.num_started += 1
            match episode.phase:
                case "new":
                    self._call(index, episode.environment.reset)
                case "ready":
                    self.ready.append(index)
                case "over":
                    self._count(index)

    def _ask(self) -> None:
        """Submits the next turns of the ready episodes."""
        indices, self.ready = self.ready, []
        self.writing += len(indices)
        completions = self.generator.submit([self.episodes[index].request for index in indices])
        for index, completion in zip(indices, completions, strict=True):
            completion.add_done_callback(functools.partial(self._on_turn_generated, index))

    def _on_turn_generated(self, index: int, completion: "Future[Completion]") -> None:
        self.events.put(_TurnGenerated(index, completion))

    def _handle(self, event: _TurnGenerated | _EnvironmentReturned) -> None:
        index = event.index
        if isinstance(event, _TurnGenerated):
            completion = event.completion.result()
            self.writing -= 1
            if completion.finish != "error":
                turn = self.episodes[index].take(completion)
                self._call(index, lambda: self._step(index, turn))
                return
            self.episodes[index].fail(completion.error)
        else:
            self._take_answer(event)
        if self.episodes[index].phase == "over":
            self._count(index)
        else:
            self.ready.append(index)

    def _step(self, index: int, turn: Turn) -> Outcome:
        return self.episodes[index].environment.step(turn)

    def _take_answer(self, event: _EnvironmentReturned) -> None:
        self.acting -= 1
        episode = self.episodes[event.index]
        if event.error:
            episode.fail(f"its environment failed: {event.error}", {ENVIRONMENT_ERRORS: 1})
        elif isinstance(event.answer, Outcome):
            episode.answer(event.answer, event.seconds)
        else:
            episode.begin(event.answer, event.seconds)

    def _call(self, index: int, call: Callable[[], Sequence[Message] | Outcome]) -> None:
        """Calls an environment in a thread."""

        def timed() -> None:
            began = time.monotonic()
            try:
                event = _EnvironmentReturned(index, call(), seconds=time.monotonic() - began)
            except Exception as error:
                event = _EnvironmentReturned(index, error=describe_root_cause(error))
            self.events.put(event)

        self.acting += 1
        self.threads.submit(timed)

    def _count(self, index: int) -> None:
        self.num_finished += 1
        self.slots.release()
        self.completions[index].set_result(self.episodes[index].completion)

    def _end_calls(self) -> None:
        """Waits for environments at work, so that every episode can be resumed."""
        while self.acting:
            event = self.events.get()
            if isinstance(event, _EnvironmentReturned):
                self._take_answer(event)
