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

from automodel_rl.batch import Media, RoutesAt, TokenSequence
from automodel_rl.generator_messages import Request


@dataclass(frozen=True)
class KeptRoutes:
    """The experts of consecutive tokens of a prompt and its completion, kept at the rank whose generator wrote it.

    Attributes:
        at: where they are.
        missing: for each of these tokens, the number of layers whose experts are not known, [stop - start].
    """

    at: RoutesAt
    missing: np.ndarray

    def piece(self, start: int, stop: int) -> "KeptRoutes":
        """Routes of a slice of the tokens, counted from the prompt's first token."""
        missing = self.missing[start - self.at.start : stop - self.at.start]
        return KeptRoutes(dataclasses.replace(self.at, start=start, stop=stop), missing)


@dataclass(frozen=True)
class Branch:
    """A prompt and what followed it, as a row to train on. An episode has several where its history forked.

    Attributes:
        prompt: the prompt's tokens.
        token_ids: the tokens after it.
        logprobs: their log-probabilities; 0 where they were not sampled.
        sampled: whether each of them was sampled by the generator, and counts in this row. A turn that several branches
            share counts in the first of them.
        routes: experts of all tokens, as in `Completion`.
    """

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    sampled: list[bool]
    routes: list[KeptRoutes] | None = None

    @property
    def trained(self) -> list[bool]:
        """Whether each token after the prompt can be trained on: sampled, and with a log-probability that is one."""
        return [sampled and is_logprob(value) for sampled, value in zip(self.sampled, self.logprobs, strict=True)]

    @property
    def num_missing(self) -> int:
        """Number of choices of experts that no generator reported."""
        return sum(int(piece.missing.sum()) for piece in self.routes or ())

    def row(self, media: Sequence[Media] = (), *, trained: bool = True) -> TokenSequence:
        """The branch as a row. Tokens that can be trained on count in the loss; the values have the generator's
        log-probabilities as `rollout_logprobs`.

        Args:
            media: the prompt's images and clips.
            trained: whether any token counts.
        """
        num_before = len(self.prompt)
        return TokenSequence(
            torch.tensor([*self.prompt, *self.token_ids]),
            torch.tensor([False] * num_before + [trained and of_token for of_token in self.trained]),
            {"rollout_logprobs": torch.tensor([0.0] * num_before + self.logprobs, dtype=torch.float64)},
            media=tuple(media),
        )


@dataclass(frozen=True)
class Conversation:
    """What a completion of several turns has besides its tokens.

    Attributes:
        prompt: the tokens of its prompt, with what its environment began with.
        sampled: whether each token of the completion was sampled by the generator. The others are answers of tools or
            of an environment, written by the chat template. Only sampled tokens are trained.
        messages: its messages, those of the prompt included.
        reward: the sum of the environment's rewards.
        end: why it ended: "done", or the limit that ended it.
        metrics: numbers of its turns, calls and environment, each added up over its turns.
        branches: the other rows of an agent's episode whose history forked. The completion's own tokens are those of
            the last call, with all that came before it.
        tree: the turns of an agent's episode, as records of a run show them.
        forks: how often its history forked, by the reason in words.
        is_of_agent: whether an agent led it.
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
    is_of_agent: bool = False


@dataclass(frozen=True)
class Completion:
    """A completion that a generator wrote.

    Attributes:
        token_ids: the completion's tokens, including the token that ended it.
        logprobs: the log-probability of each token under the distribution it was sampled from, temperature included.
        finish: "stop" at an end-of-sequence token or a stop text, "length" at the limit, "error" if it failed.
        error: why it failed.
        versions: oldest and newest version of the weights that wrote it, None if they are not known. In a generator's
            own completions these are numbers of weight syncs; a fleet's are policy versions.
        routes: experts of the prompt's and the completion's tokens. A generator reports them in a form that
            `read_routes` takes, or None. They are large, so they stay at its rank: a fleet's completions have a list of
            `KeptRoutes`, which together are of all tokens; None if they were not asked for.
        conversation: what it has besides its tokens if it may have several turns.
        num_cached: tokens of its prompt that the generator did not compute again; None if not known.
        writer: the number of the fleet's member that wrote it, if a fleet did.
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
        """Why the completion cannot be an answer to a request, as from a generator with another model; "" if it can."""
        strange = next((token for token in self.token_ids if not 0 <= token < vocab_size), None)
        if strange is not None:
            return f"the generator's token {strange} is none of the model's {vocab_size}"
        if len(self.logprobs) != len(self.token_ids):
            return f"the generator gave {len(self.logprobs)} log-probabilities for {len(self.token_ids)} tokens"
        if len(self.token_ids) > request.sampling.max_tokens:
            return (
                f"the generator wrote {len(self.token_ids)} tokens, and at most {request.sampling.max_tokens} were due"
            )
        return ""

    def checked(self, request: Request, vocab_size: int) -> "Completion":
        """The completion, or an error if it cannot be an answer to a request."""
        problem = self.problem(request, vocab_size)
        return Completion([], [], "error", problem) if problem else self

    @property
    def sampled(self) -> list[bool]:
        """Whether each token was sampled by the generator, and not written by the chat template."""
        return [True] * len(self.token_ids) if self.conversation is None else self.conversation.sampled

    def branches(self, prompt: list[int]) -> list[Branch]:
        """The rows to train on, its own first.

        Args:
            prompt: the prompt's tokens, of a completion that is no conversation.
        """
        conversation = self.conversation
        before, others = (prompt, []) if conversation is None else (conversation.prompt, conversation.branches)
        return [Branch(before, self.token_ids, self.logprobs, self.sampled, self.routes), *others]

    @property
    def last_turn(self) -> list[int]:
        """The tokens of the last turn: all tokens if there is one turn."""
        sampled = self.sampled
        start = len(sampled) - sampled[::-1].index(False) if False in sampled else 0
        return self.token_ids[start:]


ROUNDING = 1e-3
"""How far above 0 rounding may leave the log-probability of a token that is nearly certain."""


def is_logprob(value: float) -> bool:
    """Whether a number can be the log-probability of a token that was sampled: finite, and 0 or less."""
    return math.isfinite(value) and value <= ROUNDING


class Generator(Protocol):
    """Writes completions. `Fleet` is one, too.

    Attributes:
        works_alone: whether it writes while this process does something else. If not, somebody must call its `wait` or
            `write`.
    """

    @property
    def works_alone(self) -> bool: ...

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        """Takes requests and returns at once.

        Returns:
            A future for each. If a single request fails, its completion has an `error`. A future raises if the
            generator is lost.

        Raises:
            Exception: the generator is lost.
        """
        ...


class RankGenerator(ABC):
    """A generator that a rank leads. Once a future of `submit` raises, it must be closed and replaced."""

    works_alone = True

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        """See `Generator.submit`."""

    def write(self) -> None:
        """Writes what was submitted, in the calling thread. Only a generator that does not work alone has to."""
        assert self.works_alone

    @abstractmethod
    def close(self) -> None:
        """Ends everything that the generator has started."""


def fail_unfinished(completions: "Sequence[Future[Completion]]", error: BaseException) -> None:
    """Fails the futures that are not done."""
    for completion in completions:
        if not completion.done():
            completion.set_exception(error)


def results(completions: "Sequence[Future[Completion]]") -> list[Completion]:
    """Waits for completions. Raises what the first failed one raises."""
    return [completion.result() for completion in completions]
