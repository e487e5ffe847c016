"""Drives episodes: conversations advance on their own, and environments run while the generator writes."""

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
"""Seconds between two looks for room for more episodes."""


@dataclass(frozen=True)
class _Written:
    """A turn that the generator wrote, or its failure."""

    place: int
    completion: "Future[Completion]"


@dataclass(frozen=True)
class _Answered:
    """What an environment began with or answered, or why it did not. `seconds` is how long it took."""

    place: int
    answer: Sequence[Message] | Outcome = ()
    error: str = ""
    seconds: float = 0.0


class EpisodeDriver:
    """Writes episodes with a generator that writes single turns.

    Args:
        at_once: most episodes that are under way at the same time, of all calls of `submit` together.
    """

    def __init__(self, at_once: int):
        self._room = threading.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="environment")

    def close(self) -> None:
        """Ends the threads of environments, once their calls have returned."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def submit(self, generator: Generator, episodes: Sequence[Episode]) -> "list[Future[Completion]]":
        """Begins episodes, or resumes them if an earlier generator was lost. A thread drives them.

        A generator that does not work alone gets all turns that are ready as one batch, once no environment is at work.

        Returns:
            A future for each episode. It raises what the generator raises; no environment is at work then.
        """
        work = _Work(generator, episodes, self._threads, self._room)
        in_thread(work.drive, "episodes")
        return work.completions


@dataclass
class _Work:
    """The episodes of one call of `submit`.

    Attributes:
        news: what the generator and environments have done.
        ready: episodes whose next turn can be written.
        begun: number of episodes that have begun, the first ones.
        writing, acting: number of turns that the generator has, and of environments at work.
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
        """Drives the episodes to their ends."""
        try:
            while self.over < len(self.episodes):
                self._begin()
                if self.ready and (self.generator.works_alone or not (self.acting or self.writing)):
                    self._ask()
                if self.over < len(self.episodes):
                    with contextlib.suppress(queue.Empty):  # others may have made room
                        self._handle(self.news.get(timeout=None if self.begun == len(self.episodes) else ROOM_SECONDS))
        except BaseException as error:
            self._end_calls()
            for _ in range(self.begun - self.over):
                self.room.release()
            fail_unfinished(self.completions, error)

    def _begin(self) -> None:
        """Begins as many episodes as there is room for."""
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
        """Lets the generator write the next turn of the episodes that are ready."""
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
        """Lets an environment work in a thread."""

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
        """Waits for environments that are at work, so that every episode is in a state to go on from."""
        while self.acting:
            event = self.news.get()
            if isinstance(event, _Answered):
                self._take_answer(event)
