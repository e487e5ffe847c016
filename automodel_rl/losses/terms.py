"""Terms of policy-gradient losses: KL estimates, means, and the correction between generator and trainer. Tensors [T]
have an entry for each token, aligned with predicting positions."""

import math

import torch
from torch import Tensor

from automodel_rl.batch import EPISODE_TOKENS, Microbatch, spread_over_tokens, sum_by_sequence
from automodel_rl.config.losses import CorrectionConfig


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) at sampled tokens (Schulman, "Approximating KL divergence", 2020)."""
    r = ref_logprobs - logprobs
    if estimator == "k1":
        return -r
    return r.square() / 2 if estimator == "k2" else torch.expm1(r) - r  # exp(r) - 1 would cancel


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """The same estimate, with the gradient of the divergence itself (Tang and Munos, arXiv:2506.09477).

    Tokens were sampled from the policy, so the gradient has a part through the sampling: for k1 and k3 the estimate
    itself. Without it k1 would have gradient 0 on average, and k3 the gradient of another divergence. Of k3 both parts
    hold exp(r), which cancels in their sum. So the sum is written out: 1 - r for k1, and -r for k2 and k3.
    """
    estimate, r = kl_estimate(logprobs, ref_logprobs, estimator).detach(), (ref_logprobs - logprobs).detach()
    return estimate + ((1.0 if estimator == "k1" else 0.0) - r) * (logprobs - logprobs.detach())


def pessimistic_ratio(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, highest: float | None = None
) -> tuple[Tensor, Tensor]:
    """The ratio q for which q A is the least of q A and clip(q) A, as PPO takes it (arXiv:1707.06347, eq. 7).

    It is clipped before exp: a ratio that overflows where clipping protects would give 0 * inf in the backward.

    Args:
        log_ratio: log q of each token, [T].
        advantages: A of each token, [T].
        low, high: clip(q) lies between them.
        highest: bound of q where A is negative, of dual clip; None for no bound.

    Returns:
        The ratios, [T], 1 or less where A is 0; and whether they were clipped, bool [T], never where A is 0.
    """
    zeros, ones = torch.zeros_like(log_ratio), torch.ones_like(log_ratio)
    least = torch.where(advantages < 0, max(low, 0.0), zeros).log()
    most = torch.where(advantages < 0, math.inf if highest is None else highest, ones)
    most = torch.where(advantages > 0, high, most).log()
    is_clipped = (advantages != 0) & ((log_ratio < least) | (log_ratio > most))
    return log_ratio.clamp(least, most).exp(), is_clipped


def mean_by_sequence(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Mean of values [T] over the counted tokens of each sequence, [N]; 0 for a sequence without any."""
    counted = torch.where(microbatch.loss_mask, values, 0.0)
    return sum_by_sequence(counted, microbatch) / sum_by_sequence(
        microbatch.loss_mask.to(values.dtype), microbatch
    ).clamp_min(1)


def sum_of_means(values: Tensor, microbatch: Microbatch) -> Tensor:
    """The means of values [T] over the counted tokens of each episode, added up: []. An episode of several rows, which
    may lie in other microbatches, has its number of counted tokens in the value `EPISODE_TOKENS`; without that value
    each sequence is an episode."""
    if EPISODE_TOKENS not in microbatch.values:
        return mean_by_sequence(values, microbatch).sum()
    sizes = microbatch.values[EPISODE_TOKENS].to(values.dtype).clamp_min(1)
    return torch.where(microbatch.loss_mask, values / sizes, 0.0).sum()


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, microbatch: Microbatch, config: CorrectionConfig
) -> Tensor:
    """Weights of tokens, [T], that correct for the difference between generator and policy; without gradient."""
    log_weight = torch.where(microbatch.loss_mask, old_logprobs - rollout_logprobs, 0.0)
    if config.kind == "truncate":
        return log_weight.exp().nan_to_num(0.0, posinf=torch.inf).clamp(config.low, config.high)
    weight = log_weight.exp().nan_to_num(0.0, posinf=0.0)
    compared = compared_weights(old_logprobs, rollout_logprobs, microbatch, config)
    return torch.where((compared >= config.low) & (compared <= config.high), weight, 0.0)


def compared_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, microbatch: Microbatch, config: CorrectionConfig
) -> Tensor:
    """What a correction compares with its bounds, for each token, [T]: its weight, or the geometric mean of its
    sequence's weights."""
    log_weight = torch.where(microbatch.loss_mask, old_logprobs - rollout_logprobs, 0.0)
    if config.kind == "sequence_mask":
        return spread_over_tokens(mean_by_sequence(log_weight, microbatch).exp(), microbatch)
    return log_weight.exp()
