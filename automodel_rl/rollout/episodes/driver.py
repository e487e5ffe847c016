"""Runs episodes concurrently: environments work while the generator writes."""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from automodel_rl.errors import innermost
from automodel_rl.generators.protocol import Completion, Generator, fail_unfinished
from automodel_rl.launch.background import in_thread
from automodel_rl.rollout.episodes.episode import ENVIRONMENT_ERRORS, Episode
from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn

ROOM_SECONDS = 0.1
"""Seconds between checks whether more episodes may begin."""


@dataclass(frozen=True)
class _Written:
    """A turn that the generator wrote, or its failure."""

    place: int
    completion: "Future[Completion]"


@dataclass(frozen=True)
class _Answered:
    """The messages of an environment's reset, or the outcome of a step, or an error. `seconds` is its duration."""

    place: int
    answer: Sequence[Message] | Outcome = ()
    error: str = ""
    seconds: float = 0.0


class EpisodeDriver:
    """Writes episodes, turn by turn, with a generator. At most `at_once` episodes run at a time, over all calls of
    `submit`."""

    def __init__(self, at_once: int):
        self._room = threading.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="environment")

    def close(self) -> None:
        """Ends the threads of environments once their current calls return."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def submit(self, generator: Generator, episodes: Sequence[Episode]) -> "list[Future[Completion]]":
        """Begins episodes, or resumes them after a generator was lost, in a thread.

        A generator that does not work alone gets all ready turns as one batch once all environments have answered.

        Returns:
            A future per episode. It raises the generator's error, once all environments have answered.
        """
        work = _Work(generator, episodes, self._threads, self._room)
        in_thread(work.drive, "episodes")
        return work.completions


@dataclass
class _Work:
    """The episodes of one call of `submit`.

    Attributes:
        news: events of the generator and the environments.
        ready: indices of episodes whose next turn can be written.
        begun: number of episodes begun, in order.
        writing, acting: numbers of turns being written, and of environments at work.
        over: number of finished episodes.
    """

    generator: Generator
    episodes: Sequence[Episode]
    threads: ThreadPoolExecutor
    room: threading.Semaphore
    news: "queue.SimpleQueue[_Written | _Answered]" = field(default_factory=queue.SimpleQueue)
    ready: list[int] = field(default_factory=list)
    begun: int = 0
    writing: int = 0
    acting: int = 0
    over: int = 0

    def __post_init__(self) -> None:
        self.completions: list[Future[Completion]] = [Future() for _ in self.episodes]

    def drive(self) -> None:
        """Handles events until all episodes are over. An error fails the remaining ones."""
        try:
            while self.over < len(self.episodes):
                self._begin()
                if self.ready and (self.generator.works_alone or not (self.acting or self.writing)):
                    self._ask()
                if self.over < len(self.episodes):
                    with contextlib.suppress(queue.Empty):  # another `submit` may have made room
                        self._handle(self.news.get(timeout=None if self.begun == len(self.episodes) else ROOM_SECONDS))
        except BaseException as error:
            self._end_calls()
            for _ in range(self.begun - self.over):
                self.room.release()
            fail_unfinished(self.completions, error)

    def _begin(self) -> None:
        """Begins as many episodes as the limit allows."""
        while self.begun < len(self.episodes) and self.room.acquire(blocking=False):
            place, episode = self.begun, self.episodes[self.begun]
            self.begun += 1
            match episode.phase:
                case "new":
                    self._call(place, episode.environment.reset)
                case "ready":
                    self.ready.append(place)
                case "over":
                    self._count(place)

    def _ask(self) -> None:
        """Submits the next turns of the ready episodes."""
        places, self.ready = self.ready, []
        self.writing += len(places)
        completions = self.generator.submit([self.episodes[place].request for place in places])
        for place, completion in zip(places, completions, strict=True):
            completion.add_done_callback(functools.partial(self._tell_written, place))

    def _tell_written(self, place: int, completion: "Future[Completion]") -> None:
        self.news.put(_Written(place, completion))

    def _handle(self, event: _Written | _Answered) -> None:
        place = event.place
        if isinstance(event, _Written):
            completion = event.completion.result()
            self.writing -= 1
            if completion.finish != "error":
                turn = self.episodes[place].take(completion)
                self._call(place, lambda: self._step(place, turn))
                return
            self.episodes[place].fail(completion.error)
        else:
            self._take_answer(event)
        if self.episodes[place].phase == "over":
            self._count(place)
        else:
            self.ready.append(place)

    def _step(self, place: int, turn: Turn) -> Outcome:
        return self.episodes[place].environment.step(turn)

    def _take_answer(self, event: _Answered) -> None:
        self.acting -= 1
        episode = self.episodes[event.place]
        if event.error:
            episode.fail(f"its environment failed: {event.error}", {ENVIRONMENT_ERRORS: 1})
        elif isinstance(event.answer, Outcome):
            episode.answer(event.answer, event.seconds)
        else:
            episode.begin(event.answer, event.seconds)

    def _call(self, place: int, call: Callable[[], Sequence[Message] | Outcome]) -> None:
        """Calls an environment in a thread."""

        def timed() -> None:
            began = time.monotonic()
            try:
                event = _Answered(place, call(), seconds=time.monotonic() - began)
            except Exception as error:
                event = _Answered(place, error=innermost(error))
            self.news.put(event)

        self.acting += 1
        self.threads.submit(timed)

    def _count(self, place: int) -> None:
        self.over += 1
        self.room.release()
        self.completions[place].set_result(self.episodes[place].completion)

    def _end_calls(self) -> None:
        """Waits for environments at work, so that every episode can be resumed."""
        while self.acting:
            event = self.news.get()
            if isinstance(event, _Answered):
                self._take_answer(event)
