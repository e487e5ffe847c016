"""Statistics of rewards: metrics, error rates, and warnings about errors."""

import math
from collections.abc import Sequence

from automodel_rl.config import RewardConfig
from automodel_rl.rollout.rewards.scorer import Score

WARN_FACTOR = 2
"""Factor by which a reward's error rate must grow before the next warning."""


def error_rates(scores: Sequence[Score], names: Sequence[str]) -> dict[str, float]:
    """Returns the share of each reward's calls that failed, by name."""
    calls = zip(*(score.errors for score in scores), strict=True)
    return {name: sum(map(bool, errors)) / len(errors) for name, errors in zip(names, calls, strict=True)}


def metric_means(scores: Sequence[Score], names: Sequence[str]) -> dict[str, float]:
    """Returns the mean of each metric of rewards, over the completions that have it, as `metric_REWARD_NAME`."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for reward, metrics in zip(names, score.metrics, strict=bool(score.metrics)):
            for name, value in metrics.items():
                values.setdefault(f"metric_{reward}_{name}", []).append(value)
    return {name: sum(of_name) / len(of_name) for name, of_name in sorted(values.items())}


class ErrorWatch:
    """Warns of rewards whose calls fail: once, and again when the rate grows by `WARN_FACTOR`."""

    def __init__(self, rewards: Sequence[RewardConfig]):
        self.rewards = rewards
        self.named_at = [0.0] * len(rewards)

    def warnings(self, scores: Sequence[Score], where: str) -> list[str]:
        """Returns new warnings, at most one line per reward. `where` names the source, such as a step."""
        lines = []
        for place, reward in enumerate(self.rewards):
            errors = [score.errors[place] for score in scores if score.errors[place]]
            rate = len(errors) / max(1, len(scores))
            if errors and rate >= WARN_FACTOR * self.named_at[place]:
                self.named_at[place] = rate
                left_out = sum(math.isnan(score.parts[place]) for score in scores)
                lines.append(
                    f"warning: rewards.function={reward.function} failed in {100 * rate:.3g}% of its calls in {where}, "
                    f"{_describe_scoring(reward, len(errors), left_out)}, the first: {errors[0]}"
                )
        return lines


def _describe_scoring(reward: RewardConfig, failed: int, left_out: int) -> str:
    scored = "scored 0" if isinstance(reward.on_error, str) else f"scored on_error={reward.on_error:g}"
    if not left_out:
        return f"which {scored}"
    if left_out == failed:
        return "whose completions were dropped"
    return f"of which {failed - left_out} {scored} and {left_out} dropped their completions"
