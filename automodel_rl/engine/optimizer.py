"""AdamW over the parts of a model, and the learning rate of every step."""

import math

import torch
from torch import nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.errors import InputError
from automodel_rl.parallel.sharding import by_mesh

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's two moments in its state."""


def build_optimizer(part: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW: matrices and embeddings with weight decay; biases, also of experts, and norm weights without."""
    named = [(name, parameter) for name, parameter in part.named_parameters() if parameter.requires_grad]
    parameters = [parameter for _, parameter in named]
    decayed = [parameter for name, parameter in named if parameter.ndim >= 2 and not name.endswith("bias")]
    others = [parameter for name, parameter in named if parameter.ndim < 2 or name.endswith("bias")]
    groups = [
        {"params": group, "weight_decay": decay}
        for members, decay in ((decayed, config.weight_decay), (others, 0.0))
        for group in by_mesh(members)
    ]
    fused = all(parameter.is_cuda for parameter in parameters)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """Learning rate of a step, a function of nothing else, so that a resumed run needs no scheduler state.

    Args:
        step: from 0.
        total_steps: length of the run; needed unless the rate stays constant.
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
