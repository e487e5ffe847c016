"""An engine in a process of its own: requests go in, completions come out, and weights in between."""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from automodel_rl.errors import WeightSyncError
from automodel_rl.rollout.child_process import ChildEndedError, ChildProcess
from automodel_rl.rollout.protocol import Completion, Request
from automodel_rl.weight_sync.channel import Message


class EngineProcess:
    """The rank's end: a `RolloutEngine`, and the `Channel` of its weights.

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
        self.child.send(start)
        try:
            while not self._answers:
                self._take(self.child.receive())
            if self._answers[0][0] == "error":
                raise RuntimeError(self._answers[0][1])
        except RuntimeError:
            self.close()
            raise
        self._answers.popleft()

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
        return functools.partial(self._wait, self._batches)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.submit(requests)()

    def close(self) -> None:
        self.child.close()

    def tell(self, message: Message) -> None:
        try:
            self.child.send(message)
        except ChildEndedError as error:
            raise WeightSyncError(str(error)) from None

    def ready(self) -> bool:
        try:
            while not self._answers and self.child.has_message():
                self._take(self.child.receive())
        except ChildEndedError as error:
            raise WeightSyncError(str(error)) from None
        return bool(self._answers)

    def hear(self) -> Message:
        return self._answers.popleft()

    def _wait(self, number: int) -> list[Completion]:
        while number not in self._done:
            self._take(self.child.receive())
        kind, *rest = self._done.pop(number)
        if kind == "failed":
            raise RuntimeError(rest[0])
        return [completion_of(*parts) for parts in rest[0]]

    def _take(self, message: Message) -> None:
        """Puts completions with completions, and everything else with what is said of weights."""
        kind, *rest = message
        if kind in ("completions", "failed"):
            self._done[rest[0]] = (kind, rest[1])
        else:
            self._answers.append(message)


def completion_of(
    token_ids: list[int], logprobs: list[float], finish: str, oldest: int | None = None, newest: int | None = None
) -> Completion:
    """What a worker says of a completion. Reasons other than stop and length, such as vLLM's abort, are failures."""
    if finish == "stop":
        return Completion(token_ids, logprobs, "stop", versions=_versions(oldest, newest))
    if finish == "length":
        return Completion(token_ids, logprobs, "length", versions=_versions(oldest, newest))
    return Completion([], [], "error", f"the engine ended it: {finish}")


def _versions(oldest: int | None, newest: int | None) -> tuple[int, int] | None:
    return None if oldest is None or newest is None else (oldest, newest)
