"""Advantages of completions from their rewards, per group."""

import torch
from torch import Tensor

from automodel_rl.config.losses import AdvantageConfig

EPSILON = 1e-6
"""Added to standard deviations. With leave_one_out, deviations of at most this fraction of the group's range do not
divide."""

ROUNDING = 64
"""Rewards that differ by at most this many units in the last place count as equal."""


def advantages(
    rewards: Tensor, config: AdvantageConfig, counts: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Computes the advantages of completions. See `AdvantageConfig` for formulas and papers.

    Args:
        rewards: [P, G] for P prompts with G completions each; for gdpo [P, G, R] with R separate rewards.
        config: the kind of advantage.
        counts: bool [P, G], False for completions to ignore; None if all count.
        weights: [R], weights of the rewards; gdpo only.

    Returns:
        [P, G], same dtype; 0 for ignored completions. `whiten: tokens` is not yet applied.
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
    """Normalises advantages to mean 0 and standard deviation 1 over all trained tokens, given the advantage and the
    number of trained tokens of each row, [N] each."""
    return _whitened(of_rows, num_tokens.to(of_rows.dtype))


def _whitened(values: Tensor, weights: Tensor) -> Tensor:
    """Normalises values by their weighted mean and sample deviation. Returns 0 where the weight is 0, and everywhere if
    values differ only by rounding."""
    total, is_counted = weights.sum(), weights > 0
    if not _differ(values.flatten()[None], is_counted.flatten()[None]):
        return torch.zeros_like(values)
    mean = (values * weights).sum() / total.clamp_min(1)
    deviation = sample_deviation(((values - mean).square() * weights).sum(), total)
    return torch.where(is_counted, (values - mean) / (deviation + EPSILON), 0.0)


def _range(rewards: Tensor, counts: Tensor) -> Tensor:
    """Largest difference within each group, [P, 1]; 0 for a group without rewards."""
    largest = torch.where(counts, rewards, -torch.inf).amax(1, keepdim=True)
    return (largest - torch.where(counts, rewards, torch.inf).amin(1, keepdim=True)).clamp_min(0)


def _rounding(rewards: Tensor, counts: Tensor) -> Tensor:
    """Largest rounding error of rewards in each group, [P, 1]."""
    return ROUNDING * torch.finfo(rewards.dtype).eps * torch.where(counts, rewards, 0.0).abs().amax(1, keepdim=True)


def _differ(rewards: Tensor, counts: Tensor) -> Tensor:
    """Whether the rewards of each group differ by more than rounding, bool [P, 1]."""
    return _range(rewards, counts) > _rounding(rewards, counts)


def _mean(rewards: Tensor, counts: Tensor) -> Tensor:
    """Mean of each group, [P, 1]."""
    return torch.where(counts, rewards, 0.0).sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp_min(1)


def _centred(rewards: Tensor, counts: Tensor) -> Tensor:
    """Rewards minus their group mean, [P, G]; 0 if they differ only by rounding."""
    return torch.where(counts & _differ(rewards, counts), rewards - _mean(rewards, counts), 0.0)


def _compared(rewards: Tensor, leave_one_out: bool, counts: Tensor) -> Tensor:
    """(reward - mean) / standard deviation, over the whole group or over its other completions, [P, G]."""
    if leave_one_out:
        places = range(rewards.shape[1])
        return torch.stack([_compared_with_others(rewards, counts, place) for place in places], 1)
    centred, sizes = _centred(rewards, counts), counts.sum(1, keepdim=True)
    return centred / (sample_deviation(centred.square().sum(1, keepdim=True), sizes) + EPSILON)


def _compared_with_others(rewards: Tensor, counts: Tensor, place: int) -> Tensor:
    """(reward - mean) / standard deviation over the others, for one completion of each group, [P]."""
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
    """Returns the standard deviation of a sample (with Bessel's correction), 0 for a sample of one, from the sum of
    squared deviations and the number of values."""
    return (squares / (count - 1).clamp_min(1)).sqrt()


def has_signal(rewards: Tensor) -> Tensor:
    """Whether the rewards [P, G] of each group differ by more than rounding, bool [P]. Groups without a difference have
    no gradient."""
    return _differ(rewards, torch.ones_like(rewards, dtype=torch.bool)).squeeze(1)


def overlong_penalty(num_tokens: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """Computes a penalty from 0 to 1 for completions close to the limit, to be subtracted from the reward (DAPO,
    arXiv:2503.14476, eq. 13). It rises linearly over the last `buffer` tokens before `max_tokens`."""
    return ((num_tokens - (max_tokens - buffer)) / buffer).clamp(0, 1)
