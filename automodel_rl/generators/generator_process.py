"""A generator in a process of its own, seen from the rank: sends it requests and weights, and receives completions."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from automodel_rl.errors import WeightSyncError, innermost
from automodel_rl.generator_messages import (
    Answer,
    Failed,
    Failure,
    Finished,
    Generate,
    Message,
    Request,
    Start,
    name_of,
)
from automodel_rl.generators.child_process import LOOK_SECONDS, ChildEndedError, ChildProcess
from automodel_rl.generators.completions import completion_of
from automodel_rl.generators.protocol import Completion, RankGenerator, fail_unfinished
from automodel_rl.weight_sync.channel import call


class NotStartedError(RuntimeError):
    """A generator does not start."""


class GeneratorProcess(RankGenerator):
    """The rank's end of a generator's process: a `Generator`, and the `Channel` of its weights.

    A thread receives messages as soon as the process sends them. Else the process could wait, in the middle of a long
    message, for a rank that is training or is itself sending.

    Args:
        child: the worker's process.
        settings: the generator's settings, as its worker takes them.
        num_workers: number of processes that hold weights: the worker, or so many children of its own.
        end_seconds: longest wait for the worker to end by itself when it is closed.

    Attributes:
        warning: what the generator warns of when it starts, in one line; empty if nothing.
    """

    def __init__(
        self,
        child: ChildProcess,
        settings: Any,
        *,
        num_workers: int = 1,
        end_seconds: float = 0.0,
    ):
        self.child = child
        self.num_workers, self.end_seconds = num_workers, end_seconds
        self.warning = ""
        self.addresses: list[str] = []
        self._numbers = itertools.count(1)
        self._batches: dict[int, list[Future[Completion]]] = {}
        self._answers: deque[Message] = deque()
        self._news = threading.Condition()
        self._ended: ChildEndedError | None = None
        self._settings = settings
        self._reader = threading.Thread(target=self._read, daemon=True, name="generator-messages")
        self._reader.start()

    def start(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Starts the generator, and waits until it has started.

        Args:
            meanwhile: called before the wait. What it raises, this raises.

        Raises:
            NotStartedError: the generator does not start; the text says why.
        """
        try:
            self.ask_to_start()
            meanwhile()
            self.wait_for_start()
        except BaseException:
            self.close()
            raise

    def ask_to_start(self) -> None:
        """The first half of `start`, for who starts several at the same time.

        Raises:
            NotStartedError: its process is gone.
        """
        try:
            self.child.send(Start(self._settings))
        except ChildEndedError as error:
            raise NotStartedError(str(error)) from None

    def wait_for_start(self) -> None:
        """The second half of `start`.

        Raises:
            NotStartedError: the generator does not start; the text says why.
        """
        try:
            self._wait_for(lambda: bool(self._answers))
        except ChildEndedError as error:
            raise NotStartedError(str(error)) from None
        match self.receive():
            case Answer("start", warning):
                self.warning = warning
            case Failure(text):
                raise NotStartedError(text)
            case other:
                raise NotStartedError(f"it answered {name_of(other)} where start was due")

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        """See `Generator.submit`.

        Raises:
            ChildEndedError: the process is gone.
        """
        completions: list[Future[Completion]] = [Future() for _ in requests]
        if not requests:
            return completions
        number = next(self._numbers)
        with self._news:
            if self._ended is not None:
                raise self._ended
            self._batches[number] = completions
        self.child.send(Generate(number, list(requests)))
        return completions

    def sleep(self, level: int, seconds: float) -> None:
        """Makes vLLM give its device memory back, once it has written all that it was asked for.

        Args:
            level: 1 keeps its weights on the host, 2 drops them.
            seconds: longest wait.

        Raises:
            WeightSyncError: it could not.
        """
        call(self, "sleep", level, seconds=seconds)

    def wake(self, what: Literal["weights", "kv_cache"], seconds: float) -> None:
        """Gives vLLM its device memory again, first that of its weights.

        Raises:
            WeightSyncError: it could not take it.
        """
        call(self, "wake", what, seconds=seconds)

    def close(self) -> None:
        self.child.close(self.end_seconds)
        self._reader.join()

    def send(self, message: Message) -> None:
        try:
            self.child.send(message)
        except ChildEndedError as error:
            raise WeightSyncError(str(error)) from None

    def ready(self) -> bool:
        if not self._answers and self._ended is not None:
            raise WeightSyncError(str(self._ended))
        return bool(self._answers)

    def receive(self) -> Message:
        return self._answers.popleft()

    def _wait_for(self, arrived: Callable[[], bool]) -> None:
        """Waits until a message has arrived. Raises ChildEndedError if it never will."""
        with self._news:
            while not arrived():
                if self._ended is not None:
                    raise self._ended
                self._news.wait(LOOK_SECONDS)

    def _read(self) -> None:
        """Receives messages in a thread, and sorts completions from answers about weights."""
        while self._ended is None:
            message = self._next_message()
            if isinstance(message, Finished):
                self._finish(message)
                continue
            with self._news:
                match message:
                    case ChildEndedError():
                        self._ended = message
                        lost, self._batches = self._batches, {}
                        for completions in lost.values():
                            fail_unfinished(completions, message)
                    case Failed(number, text) if number in self._batches:
                        fail_unfinished(self._batches.pop(number), RuntimeError(text))
                    case _:
                        self._answers.append(message)
                self._news.notify_all()

    def _finish(self, message: Finished) -> None:
        completions = self._batches.get(message.number)
        if completions is None:  # it has failed
            return
        completions[message.place].set_result(completion_of(message.written))
        if all(completion.done() for completion in completions):
            self._batches.pop(message.number, None)

    def _next_message(self) -> Any:
        """The next message of the process, or a ChildEndedError if no more will come."""
        try:
            return self.child.receive()
        except ChildEndedError as error:
            return error
        except (OSError, TypeError, ValueError):  # this rank closed the connection while reading
            return ChildEndedError("it is closed")
        except Exception as error:  # such as a message of a class that does not exist here
            return ChildEndedError(f"its process sent what cannot be read ({innermost(error)})")
