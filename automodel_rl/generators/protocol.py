"""The interface of generators: the requests they take and the completions they return."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch

from automodel_rl.batch import Media, RoutesRef, TokenSequence
from automodel_rl.generator_messages import Request


@dataclass(frozen=True)
class KeptRoutes:
    """Experts of consecutive tokens of a prompt and its completion, stored at the rank whose generator wrote it.

    Attributes:
        missing: number of layers without known experts, for each of these tokens, [stop - start].
    """

    at: RoutesRef
    missing: np.ndarray

    def piece(self, start: int, stop: int) -> "KeptRoutes":
        """Returns the routes of a slice of the tokens, counted from the prompt's first token."""
        missing = self.missing[start - self.at.start : stop - self.at.start]
        return KeptRoutes(dataclasses.replace(self.at, start=start, stop=stop), missing)


@dataclass(frozen=True)
class Branch:
    """A prompt and its continuation, as a row to train on. An episode has several if its history forked.

    Attributes:
        prompt: the prompt's tokens.
        token_ids: the tokens after the prompt.
        logprobs: log-probabilities of `token_ids`; 0 for tokens that were not sampled.
        sampled: marks `token_ids` that the generator sampled and that count in this row. A turn shared by several
            branches counts in the first.
        routes: experts of all tokens, as in `Completion`.
    """

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    sampled: list[bool]
    routes: list[KeptRoutes] | None = None

    @property
    def trained(self) -> list[bool]:
        """Marks tokens after the prompt that can be trained on: sampled, with a valid log-probability."""
        return [sampled and is_logprob(value) for sampled, value in zip(self.sampled, self.logprobs, strict=True)]

    @property
    def num_missing(self) -> int:
        """Number of expert choices, summed over tokens and layers, that no generator reported."""
        return sum(int(piece.missing.sum()) for piece in self.routes or ())

    def row(self, media: Sequence[Media] = (), *, trained: bool = True) -> TokenSequence:
        """Returns the branch as a row. Trainable tokens count in the loss, unless `trained` is False; `media` are the
        prompt's images and clips. The values are `rollout_logprobs`, the generator's log-probabilities."""
        num_before = len(self.prompt)
        return TokenSequence(
            torch.tensor([*self.prompt, *self.token_ids]),
            torch.tensor([False] * num_before + [trained and of_token for of_token in self.trained]),
            {"rollout_logprobs": torch.tensor([0.0] * num_before + self.logprobs, dtype=torch.float64)},
            media=tuple(media),
        )


@dataclass(frozen=True)
class Conversation:
    """Data of a multi-turn completion besides its tokens.

    Attributes:
        prompt: tokens of the prompt, including the messages of the environment's reset.
        sampled: marks the completion's tokens that the generator sampled, the only ones trained. Others are answers of
            tools or an environment, as written by the chat template.
        messages: all messages, including those of the prompt.
        reward: sum of the environment's rewards.
        end: "done", or the limit that ended it.
        metrics: numbers of turns, calls and the environment, summed over turns.
        branches: other rows of an agent's episode whose history forked. The completion's own tokens are those of the
            last call and its history.
        tree: the turns of an agent's episode, for the run's records.
        forks: number of forks by reason.
        is_agent_episode: whether an agent conducted it.
    """

    prompt: list[int]
    sampled: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    end: str = "done"
    metrics: dict[str, float] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    tree: list[dict[str, Any]] = field(default_factory=list)
    forks: dict[str, int] = field(default_factory=dict)
    is_agent_episode: bool = False


@dataclass(frozen=True)
class Completion:
    """A completion that a generator wrote.

    Attributes:
        token_ids: the completion's tokens, including the token that ended it.
        logprobs: log-probability of each token under the distribution it was sampled from, temperature included.
        finish: "stop" at an end-of-sequence token or a stop text, "length" at the limit, "error" if it failed.
        error: reason of the failure.
        versions: oldest and newest weights that wrote it; None if unknown. A generator reports numbers of weight syncs,
            a fleet policy versions.
        routes: experts of the tokens of prompt and completion; None if not requested. A generator reports them in a
            form that `read_routes` accepts. They are large and stay at the rank: a fleet's completions have a list of
            `KeptRoutes` that together cover all tokens.
        conversation: set for completions that may have several turns.
        num_cached: prompt tokens found in the generator's prefix cache; None if unknown.
        writer: number of the fleet's member that wrote it, if any.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "error"]
    error: str = ""
    versions: tuple[int, int] | None = None
    routes: Any = None
    conversation: Conversation | None = None
    num_cached: int | None = None
    writer: int | None = None

    def problem(self, request: Request, vocab_size: int) -> str:
        """Returns why the completion is invalid for a request, as from a generator with another model; "" if valid."""
        strange = next((token for token in self.token_ids if not 0 <= token < vocab_size), None)
        if strange is not None:
            return f"the generator returned token {strange}, but the model has {vocab_size} tokens"
        if len(self.logprobs) != len(self.token_ids):
            return f"the generator returned {len(self.logprobs)} log-probabilities for {len(self.token_ids)} tokens"
        if len(self.token_ids) > request.sampling.max_tokens:
            return (
                f"the generator wrote {len(self.token_ids)} tokens, more than max_tokens={request.sampling.max_tokens}"
            )
        return ""

    def checked(self, request: Request, vocab_size: int) -> "Completion":
        """Returns the completion, or an error completion if it is invalid for the request."""
        problem = self.problem(request, vocab_size)
        return Completion([], [], "error", problem) if problem else self

    @property
    def sampled(self) -> list[bool]:
        """Marks tokens sampled by the generator, as opposed to written by the chat template."""
        return [True] * len(self.token_ids) if self.conversation is None else self.conversation.sampled

    def branches(self, prompt: list[int]) -> list[Branch]:
        """Returns the rows to train on, its own first. `prompt` are the prompt's tokens, used unless the completion is
        a conversation."""
        conversation = self.conversation
        before, others = (prompt, []) if conversation is None else (conversation.prompt, conversation.branches)
        return [Branch(before, self.token_ids, self.logprobs, self.sampled, self.routes), *others]

    @property
    def last_turn(self) -> list[int]:
        """Tokens of the last turn; all tokens if there is only one."""
        sampled = self.sampled
        start = len(sampled) - sampled[::-1].index(False) if False in sampled else 0
        return self.token_ids[start:]


ROUNDING = 1e-3
"""Largest log-probability above 0 that is attributed to rounding."""


def is_logprob(value: float) -> bool:
    """Returns whether a value can be the log-probability of a sampled token: finite, and at most `ROUNDING`."""
    return math.isfinite(value) and value <= ROUNDING


class Generator(Protocol):
    """Interface for writing completions, which `Fleet` implements, too.

    Attributes:
        writes_in_background: whether it writes in the background. If not, its `wait` or `write` must be called.
    """

    @property
    def writes_in_background(self) -> bool: ...

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        """Queues requests and returns at once.

        Returns:
            A future per request. A request that fails gives a completion with an `error`; a future raises only if the
            generator is lost.

        Raises:
            Exception: the generator is lost.
        """
        ...


class RankGenerator(ABC):
    """Base class of generators led by a rank. Once a future of `submit` raises, it must be closed and replaced."""

    writes_in_background = True

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        """See `Generator.submit`."""

    def write(self) -> None:
        """Writes submitted requests in the calling thread. Only for generators that do not work alone."""
        assert self.writes_in_background

    @abstractmethod
    def close(self) -> None:
        """Ends all processes and threads that the generator has started."""


def fail_unfinished(completions: "Sequence[Future[Completion]]", error: BaseException) -> None:
    """Fails the futures that are not done."""
    for completion in completions:
        if not completion.done():
            completion.set_exception(error)


def results(completions: "Sequence[Future[Completion]]") -> list[Completion]:
    """Waits for completions, in order. Raises the error of the first that failed."""
    return [completion.result() for completion in completions]
