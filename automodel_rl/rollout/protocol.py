"""What a generator does, what goes into it and what comes out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from automodel_rl.generator_messages import Request
from automodel_rl.rollout.rewards.scorer import Score


@dataclass(frozen=True)
class Completion:
    """What a generator wrote.

    Attributes:
        token_ids: the completion's, the token that ended it included.
        logprobs: of every one of them under the distribution it was sampled from, temperature included.
        finish: "stop" at an end-of-sequence token or a stop text, "length" at the limit, "error" if it failed.
        error: why it failed.
        versions: of the weights, oldest and newest, that wrote it, None if they are not known. A generator counts
            weight syncs; from `RolloutCollector` they are policy versions.
        routes: experts of its tokens and its prompt's. From a generator in a form that `read_routes` takes, None if it
            does not report them; from `RolloutCollector` as `Routes`, on the rank alone whose generator wrote it, for
            they are large.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "error"]
    error: str = ""
    versions: tuple[int, int] | None = None
    routes: Any = None


class Promptlike(Protocol):
    """What is needed of a prompt."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def example(self) -> Mapping[str, Any]: ...
    @property
    def number(self) -> int: ...


@dataclass(frozen=True)
class Rollout:
    """A completion, its text and what it is worth.

    Attributes:
        completion: what a generator wrote.
        text: without special tokens.
        score: its rewards.
        writer: rank of the generator.
    """

    completion: Completion
    text: str
    score: Score
    writer: int = 0


class Generator(Protocol):
    """Writes completions with weights of its own. Each rank has one, and uses it without the others."""

    def submit(self, requests: Sequence[Request]) -> Callable[[], list[Completion]]:
        """Lets the generator begin, if it can while this process does something else.

        Args:
            requests: what to complete.

        Returns:
            A function that waits for the completions, in the order of the requests. What fails for one request is that
            completion's `error`.

        Raises:
            Exception: here or in that function: the generator is lost; it must be closed and made anew.
        """
        ...

    def close(self) -> None:
        """Ends what it has started."""
        ...
