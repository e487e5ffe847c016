"""How often rewards fail, and when to say so."""

from collections.abc import Sequence

from automodel_rl.config import RewardConfig
from automodel_rl.rollout.rewards.scorer import Score

WORSE = 2
"""A reward is named again when it fails this many times as often as when it was named last."""


def error_rates(scores: Sequence[Score], names: Sequence[str]) -> dict[str, float]:
    """Share of failed calls of each reward, by name."""
    calls = zip(*(score.errors for score in scores), strict=True)
    return {name: sum(map(bool, errors)) / len(errors) for name, errors in zip(names, calls, strict=True)}


class ErrorWatch:
    """Names rewards whose calls fail beside others that go well: once, and again when it gets clearly worse.

    Args:
        rewards: of the config.
    """

    def __init__(self, rewards: Sequence[RewardConfig]):
        self.rewards = rewards
        self.named_at = [0.0] * len(rewards)

    def warnings(self, scores: Sequence[Score], where: str) -> list[str]:
        """What is new to say, a line for each reward.

        Args:
            scores: of completions.
            where: these come from, such as a step.
        """
        lines = []
        for place, reward in enumerate(self.rewards):
            errors = [score.errors[place] for score in scores if score.errors[place]]
            rate = len(errors) / len(scores)
            if errors and rate >= WORSE * self.named_at[place]:
                self.named_at[place] = rate
                lines.append(
                    f"warning: rewards.function={reward.function} failed in {100 * rate:.3g}% of its calls in {where}, "
                    f"which scored on_error={reward.on_error:g}, the first: {errors[0]}"
                )
        return lines
