"""Prompts as rollouts need them, and completions with their rewards."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from automodel_rl.batch import Media, TokenSequence
from automodel_rl.generators.protocol import Branch, Completion
from automodel_rl.rollout.rewards.scorer import Score


class Promptlike(Protocol):
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
    """A completion with its text and rewards.

    Attributes:
        text: without the special token that ended it.
        key: unique among the rollouts of a run.
    """

    completion: Completion
    text: str
    score: Score
    key: tuple[int, int] = (0, 0)

    def branches(self, prompt: Promptlike) -> list[Branch]:
        return self.completion.branches(prompt.token_ids)

    def rows(self, prompt: Promptlike) -> list[TokenSequence]:
        """Returns the tokens to train on: one sequence, unless an agent's history forked. `loss_mask` marks generated
        tokens."""
        return [branch.row(prompt.media) for branch in self.branches(prompt)]

    @property
    def has_failed(self) -> bool:
        return self.completion.finish == "error"

    @property
    def is_rewarded(self) -> bool:
        return not self.has_failed and not self.score.is_excluded

    @property
    def measured(self) -> "Rollout":
        """The rollout for evaluation: a failed one has reward 0, and passes no test."""
        if not self.has_failed:
            return self
        count = len(self.score.parts)
        score = Score(0.0, (0.0,) * count, (self.completion.error or "it failed",) * count)
        return dataclasses.replace(self, score=score)
