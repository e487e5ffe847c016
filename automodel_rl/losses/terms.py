"""Terms of policy-gradient losses: KL estimates, means, and the correction between generator and trainer. Tensors [T]
have an entry for each token, aligned with predicting positions."""

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch, spread_over_tokens, sum_by_sequence
from automodel_rl.config.losses import CorrectionConfig


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) at sampled tokens (Schulman, "Approximating KL divergence", 2020)."""
    r = ref_logprobs - logprobs
    if estimator == "k1":
        return -r
    return r.square() / 2 if estimator == "k2" else torch.expm1(r) - r  # exp(r) - 1 would cancel


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """The same estimate, with the gradient of the divergence itself (Tang and Munos, arXiv:2506.09477).

    Tokens were sampled from the policy, so the gradient has a part through the sampling. For k1 and k3 the factor
    exp(logprobs - stop_gradient(logprobs)) = 1 adds this part. Without it k1 would have gradient 0 on average, and k3
    the gradient of another divergence. The gradient of k2 is right as it is.
    """
    estimate = kl_estimate(logprobs, ref_logprobs, estimator)
    return estimate if estimator == "k2" else estimate * (logprobs - logprobs.detach()).exp()


def mean_by_sequence(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Mean of values [T] over the counted tokens of each sequence, [N]; 0 for a sequence without any."""
    counted = torch.where(microbatch.loss_mask, values, 0.0)
    return sum_by_sequence(counted, microbatch) / sum_by_sequence(
        microbatch.loss_mask.to(values.dtype), microbatch
    ).clamp_min(1)


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
