"""Prompts as rollouts need them, and completions with their rewards."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from automodel_rl.batch import Media, TokenSequence
from automodel_rl.generators.protocol import Branch, Completion
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
    @property
    def source(self) -> int: ...


@dataclass(frozen=True)
class Rollout:
    """A completion with its text and its rewards.

    Attributes:
        completion: the completion as a generator wrote it.
        text: the completion's text, without the special token that ended it.
        score: the completion's rewards.
        key: a name that no other rollout of the run has.
    """

    completion: Completion
    text: str
    score: Score
    key: tuple[int, int] = (0, 0)

    def branches(self, prompt: Promptlike) -> list[Branch]:
        """The rows to train on: one, unless an agent's history forked.

        Args:
            prompt: the prompt.
        """
        return self.completion.branches(prompt.token_ids)

    def rows(self, prompt: Promptlike) -> list[TokenSequence]:
        """The tokens to train on, with what the model wrote in `loss_mask`: one row, unless an agent's history forked.

        Args:
            prompt: the prompt.
        """
        return [branch.row(prompt.media) for branch in self.branches(prompt)]

    @property
    def has_failed(self) -> bool:
        """Whether the completion ended in an error."""
        return self.completion.finish == "error"

    @property
    def is_rewarded(self) -> bool:
        """Whether the completion was written, and has a reward."""
        return not self.has_failed and not self.score.is_left_out

    @property
    def measured(self) -> "Rollout":
        """The rollout as a measure of the policy counts it: one that failed has the reward 0, and passes nowhere."""
        if not self.has_failed:
            return self
        count = len(self.score.parts)
        score = Score(0.0, (0.0,) * count, (self.completion.error or "it failed",) * count)
        return dataclasses.replace(self, score=score)
