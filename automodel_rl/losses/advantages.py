"""Advantages of completions from their rewards, group by group."""

import torch
from torch import Tensor

from automodel_rl.config.losses import AdvantageConfig

EPSILON = 1e-6
"""Added to standard deviations."""


def advantages(
    rewards: Tensor, config: AdvantageConfig, counts: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Advantages: how much better each completion is than what it is compared with. Papers are in `AdvantageConfig`.

    Args:
        rewards: [P, G], the rewards of G completions for each of P prompts; for gdpo [P, G, R], each of R rewards
            apart. Standard deviations are those of samples (divided by the number less 1).
        config: what a completion is compared with.
        counts: whether each completion is there, bool [P, G], for groups of unequal size; None if all are. Others
            count in no mean and in no standard deviation.
        weights: the weights of the R rewards, for gdpo.

    Returns:
        [P, G], of the same dtype; 0 for completions that are not there. They are not whitened over tokens.
    """
    counts = torch.ones(rewards.shape[:2], dtype=torch.bool) if counts is None else counts
    if config.kind == "gdpo":
        assert weights is not None
        of_each = [_compared(one, config.leave_one_out, counts) for one in rewards.unbind(2)]
        result = (torch.stack(of_each, 2) * weights.to(rewards.dtype)).sum(2)
        if config.whiten == "no":
            result = _whitened(result, counts.to(result.dtype))
        return result if config.clip is None else result.clamp(-config.clip, config.clip)
    sizes = counts.sum(1, keepdim=True)
    centred = torch.where(counts, rewards - _mean(rewards, counts), 0.0)
    if config.kind == "grpo":
        result = _compared(rewards, config.leave_one_out, counts)
    elif config.kind == "dr_grpo" or config.whiten == "tokens":
        result = centred
    elif config.kind == "rloo":
        result = centred * (sizes / (sizes - 1).clamp_min(1))
    else:
        result = centred / (sample_deviation(centred.square().sum(), sizes.sum()) + EPSILON)
    return result if config.clip is None else result.clamp(-config.clip, config.clip)


def whitened_over_tokens(of_rows: Tensor, num_tokens: Tensor) -> Tensor:
    """Advantages less their mean and divided by their standard deviation over all tokens.

    Args:
        of_rows: the advantage of each row's tokens, [N].
        num_tokens: number of each row's trained tokens, [N].
    """
    return _whitened(of_rows, num_tokens.to(of_rows.dtype))


def _whitened(values: Tensor, weights: Tensor) -> Tensor:
    """Values less their mean and divided by their sample deviation, each counted as often as its weight says; 0 where
    that is 0."""
    total = weights.sum()
    mean = (values * weights).sum() / total.clamp_min(1)
    deviation = sample_deviation(((values - mean).square() * weights).sum(), total)
    return torch.where(weights > 0, (values - mean) / (deviation + EPSILON), 0.0)


def _mean(rewards: Tensor, counts: Tensor) -> Tensor:
    """The mean of each group, [P, 1]."""
    return torch.where(counts, rewards, 0.0).sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp_min(1)


def _compared(rewards: Tensor, leave_one_out: bool, counts: Tensor) -> Tensor:
    """(reward - mean) / standard deviation of each group, or of the group's others, [P, G]."""
    mean, sizes = _mean(rewards, counts), counts.sum(1, keepdim=True)
    centred = torch.where(counts, rewards - mean, 0.0)
    squares = centred.square().sum(1, keepdim=True)
    if not leave_one_out:
        return centred / (sample_deviation(squares, sizes) + EPSILON)
    others = (sizes - 1).clamp_min(1)
    mean_of_others = -centred / others  # less the group's mean
    squares_of_others = (squares - centred.square() - others * mean_of_others.square()).clamp_min(0)
    deviation = sample_deviation(squares_of_others, sizes - 1)
    is_divided = deviation > EPSILON
    result = (centred - mean_of_others) / torch.where(is_divided, deviation + EPSILON, 1.0)
    return torch.where(counts & (sizes > 1), result, 0.0)


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
