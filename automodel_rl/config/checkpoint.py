"""When checkpoints are written and which are kept."""

from automodel_rl.config.base import Positive, Section


class CheckpointConfig(Section):
    every: Positive | None = 100
    """Steps between checkpoints, the last one at the end; null writes one only when the run is asked to stop."""

    keep_last: Positive = 2
    """Newest checkpoints kept."""

    keep_best: bool = True
    """Also keep the best one of those written at a step that validates: by val/loss, of grpo by val/reward_mean."""
