"""The learning rate of every optimizer step."""

import math

from automodel_rl.config import OptimizerConfig
from automodel_rl.errors import InputError


def learning_rate(config: OptimizerConfig, step: float, total_steps: int | None) -> float:
    """Returns the learning rate of a step. It depends on nothing else, so a resumed run needs no scheduler state.

    Args:
        step: the step's number, from 0; fractional if a run makes more or fewer steps than planned.
        total_steps: number of steps of the run; required unless the rate is constant.

    Raises:
        InputError: the rate decays or its warm-up is a share of all steps, and `total_steps` is missing.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.decay == "constant":
        return config.lr
    if total_steps is None:
        raise InputError(f"optimizer.decay={config.decay} needs the number of steps; use constant or pass total_steps")
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = 1 - progress if config.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def warmup_steps(config: OptimizerConfig, total_steps: int | None) -> int:
    """Returns the number of warm-up steps.

    Raises:
        InputError: it is a share of all steps, and `total_steps` is missing.
    """
    if config.warmup_ratio is None:
        return config.warmup_steps
    if total_steps is None:
        raise InputError(
            f"optimizer.warmup_ratio={config.warmup_ratio} needs the number of steps; use warmup_steps or pass "
            "total_steps"
        )
    return math.ceil(config.warmup_ratio * total_steps)
