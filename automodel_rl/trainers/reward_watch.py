"""Ends a run that learns nothing, because rewards do not differ."""

from collections.abc import Sequence
from pathlib import Path

from automodel_rl.errors import RolloutError
from automodel_rl.rollout.groups import Group

MOST_STEPS = 10
"""Number of steps in a row without signal after which a run ends."""


class RewardWatch:
    """Counts the last steps in which no group has rewards that differ.

    Args:
        rollouts: the folder with the run's completions, for the message.

    Attributes:
        num_steps: number of such steps in a row.
    """

    def __init__(self, rollouts: Path):
        self.rollouts = rollouts
        self.num_steps = 0

    def look_at(self, groups: Sequence[Group]) -> None:
        """Counts a step with these groups.

        Raises:
            RolloutError: too many steps had no signal.
        """
        self.num_steps = 0 if any(group.has_signal for group in groups) else self.num_steps + 1
        if self.num_steps >= MOST_STEPS:
            raise RolloutError(
                f"in {MOST_STEPS} steps in a row no prompt had completions with different rewards, so there is nothing "
                f"to learn: look at {self.rollouts}, use easier or harder prompts, or raise rollout.group_size"
            )

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_steps = state["num_steps"]
