"""The interface of environments: what the model's turns do, and what is answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant, as an environment sees it.

    Attributes:
        text: the turn's text, without special tokens.
        calls: the calls of tools in it, each with `name` and `arguments`.
        is_cut: whether the turn was cut off at the most tokens of a turn.
        problem: why a call in it cannot be read; empty if all can.
    """

    text: str
    calls: Sequence[Mapping[str, Any]] = ()
    is_cut: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Outcome:
    """What follows a turn.

    Attributes:
        messages: what the model reads before its next turn: one message of a tool for each call, or others.
        done: whether the episode ends.
        reward: reward of the turn. Rewards of all turns are added up.
        metrics: numbers for the step's metrics.
        reason: why the episode ends.
    """

    messages: Sequence[Message] = ()
    done: bool = False
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


class Environment(Protocol):
    """One episode's world. It is made for one episode, used by one thread, and closed."""

    def reset(self) -> Sequence[Message]:
        """Begins. Returns messages that the model reads after the prompt, before its first turn."""
        ...

    def step(self, turn: Turn) -> Outcome:
        """Does what a turn asks for."""
        ...

    def close(self) -> None:
        """Frees what the environment holds."""
        ...
