"""Metrics of how far a generator's log-probabilities are from the trainer's, under the names that NeMo RL gave them.

In the formulas g is the generator's log-probability of a token, and p the trainer's at the start of the step. If both
agree they are 0, or 1 where a ratio is meant. Nothing is clamped.
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
"""Metrics that are extremes, also where several optimizer steps make one record."""


def disagreement(trainer: Tensor, rollout: Tensor, microbatch: Microbatch) -> dict[str, Tensor]:
    """Values of tokens, [T], by the metric that is their mean.

    Args:
        trainer: the trainer's log-probabilities at the start of the step, [T].
        rollout: the generator's, [T].
        microbatch: `loss_mask` says which tokens count; others get the value of tokens that agree.
    """
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
    """The largest mean of exp|p - g| over a sequence's tokens; 0 without sequences."""
    errors = mean_by_sequence((trainer - rollout).abs().exp(), microbatch)
    return torch.cat([errors, errors.new_zeros(1)]).max()


def out_of_bounds(
    trainer: Tensor, rollout: Tensor, microbatch: Microbatch, config: CorrectionConfig
) -> tuple[Tensor, Tensor]:
    """Number of tokens, or of sequences, whose weight lies outside of the correction's bounds, and how many there are.

    Sequences are counted where the correction compares means of sequences.
    """
    compared = compared_weights(trainer, rollout, microbatch, config)
    is_outside = microbatch.loss_mask & ~((compared >= config.low) & (compared <= config.high))
    if not config.compares_sequences:
        return is_outside.sum(), microbatch.loss_mask.sum()
    counted = sum_by_sequence(microbatch.loss_mask.to(trainer.dtype), microbatch) > 0
    return (sum_by_sequence(is_outside.to(trainer.dtype), microbatch) > 0).sum(), counted.sum()


def effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """The share of tokens that weigh as much as all tokens with the correction's weights do (Kong, 1992), as a metric;
    none without a correction.

    Args:
        metrics: the means of the weights and of their squares; others are left alone.
    """
    square = metrics.get(SQUARE_OF_WEIGHT, 0.0)
    return {"train/effective_sample_size": metrics[WEIGHT] ** 2 / square} if square else {}
