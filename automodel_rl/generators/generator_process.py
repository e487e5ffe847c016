"""The rank's end of a generator in its own process: sends requests and weights, receives completions."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from automodel_rl.errors import WeightSyncError, describe_root_cause
from automodel_rl.generator_messages import (
    Answer,
    Failure,
    Finished,
    Generate,
    GenerateFailed,
    Message,
    Request,
    Start,
    name_of,
)
from automodel_rl.generators.child_process import POLL_SECONDS, ChildEndedError, ChildProcess
from automodel_rl.generators.completions import completion_of
from automodel_rl.generators.protocol import Completion, RankGenerator, fail_unfinished
from automodel_rl.weight_sync.channel import call


class NotStartedError(RuntimeError):
    """Raised if a generator does not start. The text is the reason."""


class GeneratorProcess(RankGenerator):
    """The rank's end of a generator's process: a `Generator`, and the `Channel` of its weights.

    A thread receives messages at once. Otherwise the process could block in the middle of a long message while the rank
    trains or sends.

    Args:
        settings: the worker's settings, sent in `Start`.
        num_workers: number of processes that hold weights: the worker itself, or its children.
        end_seconds: longest wait for the worker to exit by itself on `close`.

    Attributes:
        warning: one-line warning of the generator from its start, or "".
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
        self._batches: dict[int, dict[int, Future[Completion]]] = {}  # open ones, by index
        self._answers: deque[Message] = deque()
        self._condition = threading.Condition()
        self._ended: ChildEndedError | None = None
        self._settings = settings
        self._reader = threading.Thread(target=self._read, daemon=True, name="generator-messages")
        self._reader.start()

    def start(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Starts the generator, calls `meanwhile`, and waits until the generator has started.

        Raises:
            NotStartedError: the generator does not start.
        """
        try:
            self.ask_to_start()
            meanwhile()
            self.wait_for_start()
        except BaseException:
            self.close()
            raise

    def ask_to_start(self) -> None:
        """First half of `start`, to start several generators in parallel.

        Raises:
            NotStartedError: the process has exited.
        """
        try:
            self.child.send(Start(self._settings))
        except ChildEndedError as error:
            raise NotStartedError(str(error)) from None

    def wait_for_start(self) -> None:
        """Second half of `start`.

        Raises:
            NotStartedError: the generator does not start.
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
                raise NotStartedError(f"it answered {name_of(other)} instead of start")

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        """See `Generator.submit`.

        Raises:
            ChildEndedError: the process has exited.
        """
        completions: list[Future[Completion]] = [Future() for _ in requests]
        if not requests:
            return completions
        number = next(self._numbers)
        with self._condition:
            if self._ended is not None:
                raise self._ended
            self._batches[number] = dict(enumerate(completions))
        self.child.send(Generate(number, list(requests)))
        return completions

    def sleep(self, level: int, seconds: float) -> None:
        """Frees vLLM's device memory, once it has written all requests. Waits at most `seconds`.

        Args:
            level: 1 keeps its weights in host memory, 2 drops them.

        Raises:
            WeightSyncError: vLLM failed or timed out.
        """
        call(self, "sleep", level, seconds=seconds)

    def wake(self, what: Literal["weights", "kv_cache"], seconds: float) -> None:
        """Allocates vLLM's device memory again, for weights first. Waits at most `seconds`.

        Raises:
            WeightSyncError: vLLM failed or timed out.
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
        """Waits until `arrived()`. Raises ChildEndedError once the process has exited."""
        with self._condition:
            while not arrived():
                if self._ended is not None:
                    raise self._ended
                self._condition.wait(POLL_SECONDS)

    def _read(self) -> None:
        """Receives messages in a thread; separates completions from answers about weights."""
        while self._ended is None:
            message = self._next_message()
            if isinstance(message, Finished):
                self._finish(message)
                continue
            with self._condition:
                match message:
                    case ChildEndedError():
                        self._ended = message
                        lost, self._batches = self._batches, {}
                        for completions in lost.values():
                            fail_unfinished([*completions.values()], message)
                    case GenerateFailed(number, text) if number in self._batches:
                        fail_unfinished([*self._batches.pop(number).values()], RuntimeError(text))
                    case _:
                        self._answers.append(message)
                self._condition.notify_all()

    def _finish(self, message: Finished) -> None:
        completions = self._batches.get(message.number, {})
        completion = completions.pop(message.index, None)
        if completion is None:  # its batch has failed, or it was sent twice
            return
        if not completions:
            self._batches.pop(message.number, None)
        completion.set_result(completion_of(message.written))

    def _next_message(self) -> Any:
        """Returns the next message of the process, or a ChildEndedError at the end."""
        try:
            return self.child.receive()
        except ChildEndedError as error:
            return error
        except (OSError, TypeError, ValueError):  # this rank closed the connection while reading
            return ChildEndedError("it is closed")
        except Exception as error:  # such as a message of a class that does not exist here
            return ChildEndedError(f"its process sent an unreadable message ({describe_root_cause(error)})")
