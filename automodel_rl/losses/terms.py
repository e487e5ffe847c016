"""Terms of policy-gradient losses: KL estimates, means, and the correction between generator and trainer. Tensors [T]
have an entry for each token, aligned with predicting positions."""

import math

import torch
from torch import Tensor

from automodel_rl.batch import EPISODE_TOKENS, Microbatch, spread_over_tokens, sum_by_sequence
from automodel_rl.config.losses import CorrectionConfig, RejectConfig


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
    compared = compared_weights(old_logprobs, rollout_logprobs, microbatch, config)
    if config.kind == "none":
        weights = torch.ones_like(log_weight)
    elif config.kind in ("truncate", "product_truncate"):
        weights = compared.nan_to_num(0.0, posinf=torch.inf).clamp(config.low, config.high)
    else:
        weights = compared if config.kind == "product_mask" else log_weight.exp()
        is_inside = (compared >= config.low) & (compared <= config.high)
        weights = torch.where(is_inside, weights.nan_to_num(0.0, posinf=0.0), 0.0)
    for rule in config.reject:
        weights = torch.where(is_kept(old_logprobs, rollout_logprobs, microbatch, rule), weights, 0.0)
    return weights


def is_kept(old_logprobs: Tensor, rollout_logprobs: Tensor, microbatch: Microbatch, rule: RejectConfig) -> Tensor:
    """Whether a rule lets tokens be trained, bool [T]."""
    p, g = (torch.where(microbatch.loss_mask, one, 0.0) for one in (old_logprobs, rollout_logprobs))
    log_weight = p - g
    statistic = {
        "ratio": lambda: log_weight,
        "k2": lambda: log_weight.square() / 2,
        "k3": lambda: torch.expm1(log_weight) - log_weight,
        "tv": lambda: (p.exp() - g.exp()).abs(),
        "binary_kl": lambda: binary_divergence(g, p),
    }[rule.statistic]()
    if rule.level == "mean":
        statistic = spread_over_tokens(mean_by_sequence(statistic, microbatch), microbatch)
    elif rule.level == "sum":
        statistic = spread_over_tokens(sum_by_sequence(statistic, microbatch), microbatch)
    elif rule.level == "max":
        statistic = spread_over_tokens(_largest_by_sequence(statistic, microbatch), microbatch)
    if rule.statistic == "ratio":
        statistic = statistic.exp()
    return (statistic >= rule.low) & (statistic <= rule.high)


def binary_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL divergence of coins with probabilities exp(p) and exp(q), [T]."""
    p, q = (one.clamp_max(-torch.finfo(one.dtype).eps) for one in (p, q))  # a certain token has no other side
    other_p, other_q = torch.log(-torch.expm1(p)), torch.log(-torch.expm1(q))
    return p.exp() * (p - q) + other_p.exp() * (other_p - other_q)


def _largest_by_sequence(values: Tensor, microbatch: Microbatch) -> Tensor:
    """The largest value over the counted tokens of each sequence, [N]; -inf for a sequence without any."""
    counted = torch.where(microbatch.loss_mask, values, -torch.inf)
    return torch.segment_reduce(counted, "max", lengths=microbatch.cu_seqlens.diff().long(), unsafe=True)


def compared_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, microbatch: Microbatch, config: CorrectionConfig
) -> Tensor:
    """What a correction compares with its bounds, for each token, [T]: its weight, or the geometric mean or the product
    of its sequence's weights."""
    log_weight = torch.where(microbatch.loss_mask, old_logprobs - rollout_logprobs, 0.0)
    if config.compares_sequences:
        of_sequences = mean_by_sequence if config.kind == "sequence_mask" else sum_by_sequence
        return spread_over_tokens(of_sequences(log_weight, microbatch).exp(), microbatch)
    return log_weight.exp()


def check_pairs(microbatch: Microbatch) -> None:
    """Raises ValueError if neighbours are no pair: neighbours in the packed list, the first at an even place."""
    order = microbatch.order
    pairs = zip(order[::2], order[1::2], strict=False)
    if len(order) % 2 or any(chosen % 2 or rejected != chosen + 1 for chosen, rejected in pairs):
        raise ValueError(
            f"a microbatch holds the sequences {list(order)} of those that were packed, which are no whole pairs: use "
            "pack(..., together=2), with every chosen completion before its rejected one"
        )
