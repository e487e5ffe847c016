"""Prompts as rollouts need them, and completions with their rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from automodel_rl.batch import Media, RoutesAt, TokenSequence
from automodel_rl.generators.protocol import Completion
from automodel_rl.rollout.rewards.scorer import Score


class Promptlike(Protocol):
    """The part of a prompt that rollouts need."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def example(self) -> Mapping[str, Any]: ...
    @property
    def messages(self) -> Sequence[dict[str, Any]]: ...
    @property
    def number(self) -> int: ...
    @property
    def media(self) -> Sequence[Media]: ...


@dataclass(frozen=True)
class Rollout:
    """A completion with its text and its rewards.

    Attributes:
        completion: the completion as a generator wrote it.
        text: the completion's text, without special tokens.
        score: the completion's rewards.
        key: a name that no other rollout of the run has.
        routes: where its routes are, piece by piece, which are too large to be here; empty without any.
        num_missing: number of choices of experts that no generator reported.
    """

    completion: Completion
    text: str
    score: Score
    key: tuple[int, int] = (0, 0)
    routes: tuple[RoutesAt, ...] = ()
    num_missing: int = 0

    def sequence(self, prompt: Promptlike, *, trained: bool = True) -> TokenSequence:
        """The prompt and the completion as a row. Tokens that the generator sampled, as far as it told their
        log-probabilities, count in the loss; the values have these as `rollout_logprobs`.

        Args:
            prompt: the prompt.
            trained: whether any token counts.
        """
        before, completion = self.prompt_of(prompt), self.completion
        return TokenSequence(
            torch.tensor([*before, *completion.token_ids]),
            torch.tensor([False] * len(before) + [trained and of_token for of_token in completion.trained]),
            {"rollout_logprobs": torch.tensor([0.0] * len(before) + completion.logprobs, dtype=torch.float64)},
            media=tuple(prompt.media),
        )

    @property
    def is_rewarded(self) -> bool:
        """Whether the completion was written, and has a reward."""
        return self.completion.finish != "error" and not self.score.is_left_out

    def prompt_of(self, prompt: Promptlike) -> list[int]:
        """The tokens before the completion, given its prompt."""
        conversation = self.completion.conversation
        return prompt.token_ids if conversation is None else conversation.prompt
