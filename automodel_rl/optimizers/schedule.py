"""The learning rate of every optimizer step."""

import math

from automodel_rl.config import OptimizerConfig
from automodel_rl.errors import InputError


def learning_rate(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """Learning rate of an optimizer step. It depends on nothing else, so a resumed run needs no scheduler state.

    Args:
        config: the optimizer's settings and its schedule.
        step: the step's number, from 0.
        total_steps: number of steps of the run; needed unless the rate stays constant.

    Raises:
        InputError: the rate decays and `total_steps` is missing.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    if total_steps is None:
        raise InputError(f"optimizer.decay={config.decay} needs the number of steps; use constant or give total_steps")
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    left = 1 - progress if config.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
