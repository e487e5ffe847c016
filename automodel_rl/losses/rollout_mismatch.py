"""Metrics of the difference between generator and trainer log-probabilities, named as in NeMo RL.

In the formulas, g is a token's log-probability under the generator, and p that under the trainer at the start of the
step. If both agree, the metrics are 0, or 1 for ratios. Nothing is clamped.
"""

import math

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch, sum_by_sequence
from automodel_rl.config.losses import CorrectionConfig
from automodel_rl.losses.terms import compared_weights, kl_estimate, mean_by_sequence

OUT_OF_BOUNDS, MAX_ERROR = "train/is_oob_ratio", "train/max_seq_mult_prob_error"
WEIGHT, SQUARE_OF_WEIGHT = "train/correction_weight", "train/correction_weight_square"
RATIO_MAX, RATIO_MIN = "train/ratio_max", "train/ratio_min"

EXTREMES = {RATIO_MAX: max, MAX_ERROR: max, RATIO_MIN: min}
"""Metrics that are extremes, also when several optimizer steps are merged into one record."""


def rollout_mismatch(trainer: Tensor, rollout: Tensor, microbatch: Microbatch) -> dict[str, Tensor]:
    """Computes per-token values [T] by the name of the metric that is their mean. `trainer` and `rollout` are
    log-probabilities [T]; tokens outside `loss_mask` get the value of perfect agreement."""
    p, g = (torch.where(microbatch.loss_mask, logprobs, 0.0) for logprobs in (trainer, rollout))
    mixture = torch.logaddexp(p, g) - math.log(2)
    return {
        "train/token_mult_prob_error": (p - g).abs().exp(),
        "train/gen_kl_error": kl_estimate(g, p, "k3"),
        "train/policy_kl_error": kl_estimate(p, g, "k3"),
        "train/js_divergence_error": (kl_estimate(mixture, p, "k3") + kl_estimate(mixture, g, "k3")) / 2,
        "train/sampling_importance_ratio": (p - g).exp(),
    }


def largest_error(trainer: Tensor, rollout: Tensor, microbatch: Microbatch) -> Tensor:
    """Returns the largest per-sequence mean of exp|p - g|; 0 without sequences."""
    errors = mean_by_sequence((trainer - rollout).abs().exp(), microbatch)
    return torch.cat([errors, errors.new_zeros(1)]).max()


def out_of_bounds(
    trainer: Tensor, rollout: Tensor, microbatch: Microbatch, config: CorrectionConfig
) -> tuple[Tensor, Tensor]:
    """Returns the number of tokens whose weight is outside the correction's bounds, and the number of all tokens.
    Counts sequences instead if the correction compares sequences."""
    compared = compared_weights(trainer, rollout, microbatch, config)
    is_outside = microbatch.loss_mask & ~((compared >= config.low) & (compared <= config.high))
    if not config.compares_sequences:
        return is_outside.sum(), microbatch.loss_mask.sum()
    counted = sum_by_sequence(microbatch.loss_mask.to(trainer.dtype), microbatch) > 0
    return (sum_by_sequence(is_outside.to(trainer.dtype), microbatch) > 0).sum(), counted.sum()


def effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the effective sample size as a fraction of the tokens (Kong, 1992), from the means of the correction
    weights and of their squares in `metrics`; {} without a correction."""
    square = metrics.get(SQUARE_OF_WEIGHT, 0.0)
    return {"train/effective_sample_size": metrics[WEIGHT] ** 2 / square} if square else {}
