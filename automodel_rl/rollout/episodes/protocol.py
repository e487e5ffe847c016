"""Interface of environments: the model's turns, and the answers to them.

Imports only the standard library, as every environment's process loads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant, as an environment sees it.

    Attributes:
        text: the whole turn, without special tokens.
        content: without thoughts and calls.
        calls: each with `name` and `arguments`.
        is_truncated: truncated at the token limit of a turn.
        problem: why a call cannot be parsed; empty if all can.
        reasoning: thoughts, if the chat template has a known format for them.
    """

    text: str
    content: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    is_truncated: bool = False
    problem: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Outcome:
    """An environment's answer to a turn.

    Attributes:
        messages: for the model: one with role tool for each call, or others.
        done: the conversation ends. It also ends without messages.
        reward: of this turn; added up over turns.
        metrics: numbers for the step's metrics; added up over turns.
    """

    messages: Sequence[Message] = ()
    done: bool = False
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """The environment of one conversation. Used by one thread, and closed at the end."""

    def reset(self) -> Sequence[Message]:
        """Begins. Returns messages that follow the prompt, before the model's first turn. If the prompt ends and these
        begin with a message of the user, the two texts are joined."""
        ...

    def step(self, turn: Turn) -> Outcome: ...

    def close(self) -> None: ...


class EnvironmentFactory(Protocol):
    """The object that `rollout.environment` names. An attribute `tools` is optional: JSON schemas of the environments'
    tools, which the chat template shows to the model."""

    def __call__(self, example: dict[str, Any], seed: int) -> Environment:
        """Creates the environment of one conversation.

        Args:
            example: the record of the prompt, with the prompt's messages as `messages`.
            seed: shared by all conversations of a prompt, so that their rewards are comparable.
        """
        ...
