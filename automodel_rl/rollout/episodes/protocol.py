"""The interface of environments: what the model's turns do, and what is answered.

This file imports only the standard library, for every process of an environment loads it.
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
        content: the turn without its thoughts and calls.
        calls: the calls of tools in it, each with `name` and `arguments`.
        is_cut: whether the turn was cut off at the most tokens of a turn.
        problem: why a call in it cannot be read; empty if all can.
        reasoning: the turn's thoughts, if the chat template has a known format for them.
    """

    text: str
    content: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    is_cut: bool = False
    problem: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Outcome:
    """What follows a turn.

    Attributes:
        messages: what the model reads before its next turn: one message of a tool for each call, or others.
        done: whether the conversation ends. It also ends if there are no messages.
        reward: reward of the turn. Rewards of all turns are added up.
        metrics: numbers for the step's metrics, added up over the turns.
    """

    messages: Sequence[Message] = ()
    done: bool = False
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """The world of one conversation. It is made for one, used by one thread, and closed."""

    def reset(self) -> Sequence[Message]:
        """Begins. Returns messages that the model reads after the prompt, before its first turn. If both the prompt
        ends and these begin with a message of the user, the second text is added to the first."""
        ...

    def step(self, turn: Turn) -> Outcome:
        """Does what a turn asks for."""
        ...

    def close(self) -> None:
        """Frees what the environment holds."""
        ...


class EnvironmentFactory(Protocol):
    """What `rollout.environment` names. It may have an attribute `tools`: JSON schemas of the tools that its
    environments answer, which the chat template shows to the model."""

    def __call__(self, example: dict[str, Any], seed: int) -> Environment:
        """Makes the environment of one conversation.

        Args:
            example: the record of the prompt, with the prompt's messages as `messages`.
            seed: a seed that all conversations of a prompt share, so that their rewards can be compared.
        """
        ...
