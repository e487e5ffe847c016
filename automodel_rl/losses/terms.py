"""Terms of policy-gradient losses: KL estimates, means, and corrections between generator and trainer. Tensors [T] have
one entry per token, aligned with predicting positions."""

import math

import torch
from torch import Tensor

from automodel_rl.batch import EPISODE_TOKENS, Microbatch, spread_over_tokens, sum_by_sequence
from automodel_rl.config.losses import CorrectionConfig, RejectConfig


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates KL(policy || reference) at sampled tokens (Schulman, "Approximating KL divergence", 2020)."""
    r = ref_logprobs - logprobs
    if estimator == "k1":
        return -r
    return r.square() / 2 if estimator == "k2" else torch.expm1(r) - r  # exp(r) - 1 would cancel


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Returns the same estimate with the gradient of the divergence itself (Tang and Munos, arXiv:2506.09477).

    Sampling from the policy adds a term to the gradient, which for k1 and k3 is the estimate itself. Without it, the
    gradient would be 0 on average for k1, and that of another divergence for k3. In k3 both terms contain exp(r), which
    cancels, so the sum is written out: 1 - r for k1, and -r for k2 and k3.
    """
    estimate, r = kl_estimate(logprobs, ref_logprobs, estimator).detach(), (ref_logprobs - logprobs).detach()
    return estimate + ((1.0 if estimator == "k1" else 0.0) - r) * (logprobs - logprobs.detach())


def pessimistic_ratio(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, highest: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the ratio q that gives min(q A, clip(q) A), as in PPO (arXiv:1707.06347, eq. 7), at most 1 where A is 0,
    and whether it was clipped, never where A is 0; both [T]. The logarithm is clipped before exp: an overflowing ratio
    would give 0 * inf in the backward even where it is clipped.

    Args:
        log_ratio: log q of each token, [T].
        advantages: A of each token, [T].
        low, high: clipping range of q.
        highest: dual-clip bound of q where A is negative; None for no bound.
    """
    zeros, ones = torch.zeros_like(log_ratio), torch.ones_like(log_ratio)
    least = torch.where(advantages < 0, max(low, 0.0), zeros).log()
    most = torch.where(advantages < 0, math.inf if highest is None else highest, ones)
    most = torch.where(advantages > 0, high, most).log()
    is_clipped = (advantages != 0) & ((log_ratio < least) | (log_ratio > most))
    return log_ratio.clamp(least, most).exp(), is_clipped


def mean_by_sequence(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Averages values [T] over the trained tokens of each sequence: [N]; 0 for a sequence without any."""
    counted = torch.where(microbatch.loss_mask, values, 0.0)
    return sum_by_sequence(counted, microbatch) / sum_by_sequence(
        microbatch.loss_mask.to(values.dtype), microbatch
    ).clamp_min(1)


def sum_of_means(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Sums the means of values [T] over the trained tokens of each episode: []. The value `EPISODE_TOKENS` holds the
    number of trained tokens of an episode with several rows, some possibly in other microbatches; without it, each
    sequence is an episode."""
    if EPISODE_TOKENS not in microbatch.values:
        return mean_by_sequence(values, microbatch).sum()
    sizes = microbatch.values[EPISODE_TOKENS].to(values.dtype).clamp_min(1)
    return torch.where(microbatch.loss_mask, values / sizes, 0.0).sum()


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, microbatch: Microbatch, config: CorrectionConfig
) -> Tensor:
    """Computes the weights [T], without gradient, that correct for the difference between generator and policy."""
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
    """Whether a rule allows tokens to be trained, bool [T]."""
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
    """Computes the KL divergence between Bernoulli distributions with probabilities exp(p) and exp(q), [T]."""
    p, q = (one.clamp_max(-torch.finfo(one.dtype).eps) for one in (p, q))  # log(1 - exp(p)) is -inf at p = 0
    other_p, other_q = torch.log(-torch.expm1(p)), torch.log(-torch.expm1(q))
    return p.exp() * (p - q) + other_p.exp() * (other_p - other_q)


def _largest_by_sequence(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Returns the largest value over the trained tokens of each sequence, [N]; -inf for a sequence without any."""
    counted = torch.where(microbatch.loss_mask, values, -torch.inf)
    return torch.segment_reduce(counted, "max", lengths=microbatch.cu_seqlens.diff().long(), unsafe=True)


def compared_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, microbatch: Microbatch, config: CorrectionConfig
) -> Tensor:
    """Returns what a correction compares with its bounds for each token, [T]: its weight, or the geometric mean or
    product of the weights of its sequence."""
    log_weight = torch.where(microbatch.loss_mask, old_logprobs - rollout_logprobs, 0.0)
    if config.compares_sequences:
        of_sequences = mean_by_sequence if config.kind == "sequence_mask" else sum_by_sequence
        return spread_over_tokens(of_sequences(log_weight, microbatch).exp(), microbatch)
    return log_weight.exp()


def check_pairs(microbatch: Microbatch) -> None:
    """Raises ValueError unless adjacent sequences are pairs: neighbours in the packed list, the first at an even
    index."""
    order = microbatch.order
    pairs = zip(order[::2], order[1::2], strict=False)
    if len(order) % 2 or any(chosen % 2 or rejected != chosen + 1 for chosen, rejected in pairs):
        raise ValueError(
            f"a microbatch holds the packed sequences {list(order)}, which are not whole pairs: use pack(..., "
            "sequences_per_example=2), with every chosen completion before its rejected one"
        )
