"""Jobs that a program asks of the ranks' rollouts: completions by their generators, and the completions' rewards."""

from collections.abc import Sequence
from dataclasses import dataclass

from automodel_rl.config import RewardConfig
from automodel_rl.generator_messages import Sampling
from automodel_rl.policy.jobs import Job
from automodel_rl.rollout.protocol import Promptlike


@dataclass(frozen=True)
class OpenConversations(Job):
    """Start tools or environments. The answer is a `ConversationFacts`."""


@dataclass(frozen=True)
class ConversationFacts:
    """What a program needs to know of conversations.

    Attributes:
        schemas: JSON schemas of the tools.
        stop_ids: tokens with which the chat template ends turns.
        warning: what protection the system does not allow, in one line; empty if nothing is missing.
    """

    schemas: tuple[dict[str, object], ...]
    stop_ids: tuple[int, ...]
    warning: str


@dataclass(frozen=True)
class OpenRollouts(Job):
    """Start the rewards."""

    rewards: Sequence[RewardConfig]


@dataclass(frozen=True)
class BeginRollouts(Job):
    """Let generators begin to write.

    Attributes:
        number: a number by which the completions are taken.
        prompts: the prompts.
        group_size: number of completions of each.
        sampling: how tokens are drawn, and where completions end.
    """

    number: int
    prompts: Sequence[Promptlike]
    group_size: int
    sampling: Sampling


@dataclass(frozen=True)
class TakeRollouts(Job):
    """Wait for completions and score them. The answers are rollouts by their places, from the ranks that wrote them.

    Attributes:
        number: the number with which they were begun.
        keeps_routes: whether the ranks keep the routes, for training.
    """

    answered_by = "all"

    number: int
    keeps_routes: bool


@dataclass(frozen=True)
class CloseRollouts(Job):
    """End the processes of rewards and environments."""
