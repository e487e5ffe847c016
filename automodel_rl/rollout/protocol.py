"""Prompts as rollouts need them, and completions with their rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from automodel_rl.batch import Media
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
        writer: the rank whose generator wrote it.
    """

    completion: Completion
    text: str
    score: Score
    writer: int = 0

    def prompt_of(self, prompt: Promptlike) -> list[int]:
        """The tokens before the completion, given its prompt."""
        conversation = self.completion.conversation
        return prompt.token_ids if conversation is None else conversation.prompt
