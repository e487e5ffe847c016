"""Advantages of completions from their rewards, group by group."""

import torch
from torch import Tensor

from automodel_rl.config.losses import AdvantageConfig

EPSILON = 1e-6
"""Added to standard deviations. The deviation of a reward's others divides nothing below this share of the group's
range."""

ROUNDING = 64
"""Rewards whose difference is at most so many units in the last place are equal."""


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
    centred, sizes = _centred(rewards, counts), counts.sum(1, keepdim=True).to(rewards.dtype)
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
    that is 0, and if they differ by no more than rounding."""
    total, is_counted = weights.sum(), weights > 0
    if not _differ(values.flatten()[None], is_counted.flatten()[None]):
        return torch.zeros_like(values)
    mean = (values * weights).sum() / total.clamp_min(1)
    deviation = sample_deviation(((values - mean).square() * weights).sum(), total)
    return torch.where(is_counted, (values - mean) / (deviation + EPSILON), 0.0)


def _range(rewards: Tensor, counts: Tensor) -> Tensor:
    """The largest difference within each group, [P, 1]; 0 for a group without rewards."""
    largest = torch.where(counts, rewards, -torch.inf).amax(1, keepdim=True)
    return (largest - torch.where(counts, rewards, torch.inf).amin(1, keepdim=True)).clamp_min(0)


def _rounding(rewards: Tensor, counts: Tensor) -> Tensor:
    """How far rounding may move rewards of each group apart that were computed in different ways, [P, 1]."""
    return ROUNDING * torch.finfo(rewards.dtype).eps * torch.where(counts, rewards, 0.0).abs().amax(1, keepdim=True)


def _differ(rewards: Tensor, counts: Tensor) -> Tensor:
    """Whether the rewards of each group differ by more than rounding, bool [P, 1]."""
    return _range(rewards, counts) > _rounding(rewards, counts)


def _mean(rewards: Tensor, counts: Tensor) -> Tensor:
    """The mean of each group, [P, 1]."""
    return torch.where(counts, rewards, 0.0).sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp_min(1)


def _centred(rewards: Tensor, counts: Tensor) -> Tensor:
    """Rewards less the mean of their group, [P, G]; 0 if they differ by no more than rounding."""
    return torch.where(counts & _differ(rewards, counts), rewards - _mean(rewards, counts), 0.0)


def _compared(rewards: Tensor, leave_one_out: bool, counts: Tensor) -> Tensor:
    """(reward - mean) / standard deviation of each group, or of the group's others, [P, G]."""
    if leave_one_out:
        places = range(rewards.shape[1])
        return torch.stack([_compared_with_others(rewards, counts, place) for place in places], 1)
    centred, sizes = _centred(rewards, counts), counts.sum(1, keepdim=True)
    return centred / (sample_deviation(centred.square().sum(1, keepdim=True), sizes) + EPSILON)


def _compared_with_others(rewards: Tensor, counts: Tensor, place: int) -> Tensor:
    """(reward - mean) / standard deviation of the others, of the completion at a place of each group, [P]."""
    others = counts.clone()
    others[:, place] = False
    sizes = others.sum(1, keepdim=True)
    deviation = sample_deviation(_centred(rewards, others).square().sum(1, keepdim=True), sizes)
    is_divided = deviation > EPSILON * _range(rewards, counts)
    own = rewards[:, place, None]
    result = (own - _mean(rewards, others)) / torch.where(is_divided, deviation + EPSILON, 1.0)
    is_compared = counts[:, place, None] & (sizes > 0) & _differ(rewards, counts)
    return torch.where(is_compared, result, 0.0).squeeze(1)


def sample_deviation(squares: Tensor, count: Tensor) -> Tensor:
    """The standard deviation of a sample, 0 for a sample of one.

    Args:
        squares: sum of the squared distances from the mean, any shape.
        count: number of values, of the same shape.
    """
    return (squares / (count - 1).clamp_min(1)).sqrt()


def has_signal(rewards: Tensor) -> Tensor:
    """Whether the rewards [P, G] of each group differ by more than rounding, bool [P]. If they do not, nothing can be
    learned from it."""
    return _differ(rewards, torch.ones_like(rewards, dtype=torch.bool)).squeeze(1)


def overlong_penalty(num_tokens: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """Penalty for completions that come close to the limit, from 0 to 1 (DAPO, arXiv:2503.14476, eq. 13).

    It is subtracted from the reward and rises over the last `buffer` tokens before the limit.

    Args:
        num_tokens: lengths of completions, any shape.
        max_tokens: length of the longest completion.
        buffer: number of tokens over which the penalty rises.
    """
    return ((num_tokens - (max_tokens - buffer)) / buffer).clamp(0, 1)
