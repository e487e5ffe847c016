"""An engine in a process of its own: requests go in, completions come out, and weights in between."""

import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from automodel_rl.errors import WeightSyncError
from automodel_rl.rollout.child_process import LOOK_SECONDS, ChildEndedError, ChildProcess
from automodel_rl.rollout.protocol import Completion, Request
from automodel_rl.weight_sync.channel import Message


class EngineProcess:
    """The rank's end: a `RolloutEngine`, and the `Channel` of its weights.

    A thread takes what the process says as soon as it says it: the process must not wait, in the midst of saying
    something long, for a rank that trains, or that is itself saying something.

    Args:
        command: of the worker.
        environment: its variables; None for this process's.
        start: message that starts the engine.

    Raises:
        OSError: the process cannot be started.
        RuntimeError: the engine cannot, and says why.
    """

    num_workers = 1

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None, start: Message):
        self.child = ChildProcess(command, environment)
        self._batches = 0
        self._done: dict[int, Message] = {}
        self._answers: deque[Message] = deque()
        self._news = threading.Condition()
        self._ended: ChildEndedError | None = None
        self._reader = threading.Thread(target=self._read, daemon=True, name="engine-messages")
        self._reader.start()
        try:
            self.child.send(start)
            self._wait_for(lambda: bool(self._answers))
            kind, *rest = self.hear()
            if kind == "error":
                raise RuntimeError(rest[0])
        except RuntimeError:
            self.close()
            raise

    def submit(self, requests: Sequence[Request]) -> Callable[[], list[Completion]]:
        """Lets it begin; what is returned waits for the completions.

        Raises:
            ChildEndedError: the process is gone.
        """
        if not requests:
            return list
        self._batches += 1
        asked = [(request.prompt, request.seed, request.temperature) for request in requests]
        self.child.send(("generate", self._batches, asked))
        return functools.partial(self._completions, self._batches)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.submit(requests)()

    def close(self) -> None:
        self.child.close()
        self._reader.join()

    def tell(self, message: Message) -> None:
        try:
            self.child.send(message)
        except ChildEndedError as error:
            raise WeightSyncError(str(error)) from None

    def ready(self) -> bool:
        if not self._answers and self._ended is not None:
            raise WeightSyncError(str(self._ended))
        return bool(self._answers)

    def hear(self) -> Message:
        return self._answers.popleft()

    def _completions(self, number: int) -> list[Completion]:
        self._wait_for(lambda: number in self._done)
        kind, *rest = self._done.pop(number)
        if kind == "failed":
            raise RuntimeError(rest[0])
        return [completion_of(*parts) for parts in rest[0]]

    def _wait_for(self, arrived: Callable[[], bool]) -> None:
        """Raises ChildEndedError if it never will."""
        with self._news:
            while not arrived():
                if self._ended is not None:
                    raise self._ended
                self._news.wait(LOOK_SECONDS)

    def _read(self) -> None:
        """Puts completions with completions, and everything else with what is said of weights."""
        while self._ended is None:
            try:
                message = self.child.receive()
            except ChildEndedError as error:
                self._ended, message = error, ()
            except (OSError, TypeError, ValueError):  # closed by this rank in the midst of reading
                self._ended, message = ChildEndedError("it is closed"), ()
            with self._news:
                if message and message[0] in ("completions", "failed"):
                    self._done[message[1]] = (message[0], message[2])
                elif message:
                    self._answers.append(message)
                self._news.notify_all()


def completion_of(
    token_ids: list[int],
    logprobs: list[float],
    finish: str,
    oldest: int | None = None,
    newest: int | None = None,
    routes: Any = None,
) -> Completion:
    """What a worker or server says of a completion. Reasons other than stop and length, such as vLLM's abort, are
    failures, and so is what cannot be: it may come from elsewhere."""
    wrong = _what_is_wrong(token_ids, logprobs)
    if wrong is not None:
        return Completion([], [], "error", f"the engine's answer makes no sense: {wrong}")
    if finish == "stop":
        return Completion(token_ids, logprobs, "stop", versions=_versions(oldest, newest), routes=routes)
    if finish == "length":
        return Completion(token_ids, logprobs, "length", versions=_versions(oldest, newest), routes=routes)
    return Completion([], [], "error", f"the engine ended it: {finish}")


def _what_is_wrong(token_ids: Any, logprobs: Any) -> str | None:
    if not isinstance(token_ids, list) or not isinstance(logprobs, list) or len(token_ids) != len(logprobs):
        return "token_ids and logprobs are not lists of one length"
    if not all(type(token) is int and 0 <= token < 2**31 for token in token_ids):
        return "a token id is no whole number from 0 on"
    if not all(type(score) in (int, float) and math.isfinite(score) and score <= 1e-3 for score in logprobs):
        return "a log-probability is not a number up to 0"
    return None


def _versions(oldest: int | None, newest: int | None) -> tuple[int, int] | None:
    return None if oldest is None or newest is None else (oldest, newest)
