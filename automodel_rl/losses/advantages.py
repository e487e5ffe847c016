"""Advantages of completions from their rewards, group by group."""

import torch
from torch import Tensor

from automodel_rl.config.losses import AdvantageConfig

EPSILON = 1e-6
"""Added to standard deviations."""


def advantages(rewards: Tensor, config: AdvantageConfig, counts: Tensor | None = None) -> Tensor:
    """Advantages: how much better each completion is than what it is compared with. Papers are in `AdvantageConfig`.

    Args:
        rewards: [P, G], the rewards of G completions for each of P prompts. Standard deviations are those of samples
            (divided by the number less 1).
        config: what a completion is compared with.
        counts: whether each completion is there, bool [P, G], for groups of unequal size; None if all are. Others
            count in no mean and in no standard deviation.

    Returns:
        [P, G], of the same dtype; 0 for completions that are not there.
    """
    counts = torch.ones_like(rewards, dtype=torch.bool) if counts is None else counts
    sizes = counts.sum(1, keepdim=True)
    mean = torch.where(counts, rewards, 0.0).sum(1, keepdim=True) / sizes.clamp_min(1)
    centred = torch.where(counts, rewards - mean, 0.0)
    if config.kind == "grpo":
        result = centred / (sample_deviation(centred.square().sum(1, keepdim=True), sizes) + EPSILON)
    elif config.kind == "dr_grpo":
        result = centred
    elif config.kind == "rloo":
        result = centred * (sizes / (sizes - 1).clamp_min(1))
    else:
        result = centred / (sample_deviation(centred.square().sum(), sizes.sum()) + EPSILON)
    return result if config.clip is None else result.clamp(-config.clip, config.clip)


def sample_deviation(squares: Tensor, count: Tensor) -> Tensor:
    """The standard deviation of a sample, 0 for a sample of one.

    Args:
        squares: sum of the squared distances from the mean, any shape.
        count: number of values, of the same shape.
    """
    return (squares / (count - 1).clamp_min(1)).sqrt()


def has_signal(rewards: Tensor) -> Tensor:
    """Whether the rewards [P, G] of each group differ, bool [P]. If they do not, nothing can be learned from it."""
    return rewards.amax(1) > rewards.amin(1)


def overlong_penalty(num_tokens: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """Penalty for completions that come close to the limit, from 0 to 1 (DAPO, arXiv:2503.14476, eq. 13).

    It is subtracted from the reward and rises over the last `buffer` tokens before the limit.

    Args:
        num_tokens: lengths of completions, any shape.
        max_tokens: length of the longest completion.
        buffer: number of tokens over which the penalty rises.
    """
    return ((num_tokens - (max_tokens - buffer)) / buffer).clamp(0, 1)
