"""The policy-gradient losses: GRPO, DAPO, GSPO, CISPO and others as settings of one function."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch, spread_over_tokens
from automodel_rl.config.losses import CorrectionConfig, PolicyLossConfig
from automodel_rl.losses.outputs import Denominator, LossOutput, TokenOutputs
from automodel_rl.losses.rollout_mismatch import (
    MAX_ERROR,
    OUT_OF_BOUNDS,
    RATIO_MAX,
    RATIO_MIN,
    SQUARE_OF_WEIGHT,
    WEIGHT,
    largest_error,
    out_of_bounds,
    rollout_mismatch,
)
from automodel_rl.losses.surrogates import SURROGATES, Ratios
from automodel_rl.losses.terms import (
    correction_weights,
    is_kept,
    kl_estimate,
    kl_loss,
    mean_by_sequence,
    sum_of_means,
)

UNCERTAIN = "uncertain"
"""Name of the values that select tokens with a policy term, 1 or 0, [T]."""


def grpo_loss(outputs: TokenOutputs, microbatch: Microbatch, config: PolicyLossConfig) -> LossOutput:
    """Computes a policy-gradient loss over completions. See `PolicyLossConfig` for formulas and papers.

    Args:
        outputs: log-probabilities under the policy, and its entropy.
        microbatch: `loss_mask` selects the generated tokens. `values` has `advantages`; `old_logprobs` unless
            `on_policy` is True; `rollout_logprobs` for a correction or `off_policy_bound`; `ref_logprobs` for a KL
            term; `uncertain` (see `uncertain_tokens`) if that setting is below 1. Optional `rollout_logprobs` and
            `live_logprobs` (without router replay) add metrics of their difference from the trainer.
        config: settings.

    Returns:
        A sum over tokens or over sequences, float64. Tokens whose `rollout_logprobs` is not finite are excluded from
            the loss, the sequence's mean ratio and metrics, but not from the divisor, which is counted by `loss_mask`
            elsewhere; trainers remove such tokens from `loss_mask`, too.

        Metrics: means over tokens of train/ratio_mean, train/clip_fraction, train/entropy, train/kl_ref,
            train/correction_weight and its square; train/ratio_max and train/ratio_min; the difference between
            generator and trainer in train/logprob_error, train/logprob_error_live and the metrics of
            losses/rollout_mismatch.py.

    Raises:
        ValueError: a required value is missing, or `normalise: constant` lacks its constant.

    Example:
        >>> import torch
        >>> values = {"advantages": torch.ones(3), "rollout_logprobs": torch.zeros(3)}
        >>> sequence = TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]), values)
        >>> (microbatch,) = pack([sequence], capacity=8)
        >>> outputs = TokenOutputs(torch.tensor([-0.5, -1.5, 0.0]))
        >>> loss = grpo_loss(outputs, microbatch, PolicyLossConfig(on_policy=True))
        >>> loss.sums["tokens"].item()  # ratio and advantage are 1
        -2.0
    """
    if config.entropy and outputs.entropy is None:
        raise ValueError(f"entropy={config.entropy} needs the policy's entropy: read it with Readout(entropy=True)")
    _check_values(microbatch, config)
    microbatch = _without_lost_tokens(microbatch)
    # In float64: in fp32, ratios overflow at a log-ratio of 89. One value per token costs little.
    values = {name: value.double() for name, value in microbatch.values.items()}
    logprobs = outputs.logprobs.double()
    old = logprobs.detach() if config.on_policy is True else values["old_logprobs"]
    log_ratio = _log_ratio(logprobs - old, microbatch, config)
    weight, of_weights, metrics = _correction(old, values, microbatch, config.correction)
    ratios = Ratios(logprobs, old, log_ratio, values["advantages"], weight, microbatch)
    loss, is_clipped = SURROGATES[config.surrogate](ratios, config)
    if config.uncertain < 1:
        loss = torch.where(values[UNCERTAIN] > 0, loss, 0.0)

    ratio = log_ratio.detach().exp()
    per_token = {"train/ratio_mean": ratio, "train/clip_fraction": is_clipped.to(loss.dtype)}
    per_token |= _rollout_errors(old, values, microbatch) | of_weights
    penalties, of_penalties = _penalties(outputs, values, microbatch, config)
    per_token |= of_penalties
    loss = loss + penalties
    if config.off_policy_bound is not None:
        is_far = _is_far(ratios, values["rollout_logprobs"], config.off_policy_bound)
        loss, per_token["train/far_fraction"] = torch.where(is_far, 0.0, loss), is_far.to(loss.dtype)
    metrics |= _means(per_token, microbatch)
    return LossOutput(_normalise(loss, microbatch, config), metrics, **_extremes(ratio, old, values, microbatch))


def _correction(
    old: Tensor, values: dict[str, Tensor], microbatch: Microbatch, config: CorrectionConfig
) -> tuple[Tensor | None, dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Returns the weights of a correction, [T] (None without one), per-token values of metrics that are means, and
    other metrics."""
    if not config.is_on:
        return None, {}, {}
    rollout = values["rollout_logprobs"]
    weight = correction_weights(old, rollout, microbatch, config)
    per_token, metrics = {WEIGHT: weight, SQUARE_OF_WEIGHT: weight.square()}, {}
    if config.kind != "none":
        metrics[OUT_OF_BOUNDS] = out_of_bounds(old, rollout, microbatch, config)
    if config.reject:
        kept = torch.stack([is_kept(old, rollout, microbatch, rule) for rule in config.reject]).all(0)
        per_token["train/rejected"] = 1 - kept.to(weight.dtype)
    return weight, per_token, metrics


def _is_far(ratios: Ratios, rollout_logprobs: Tensor, bound: float) -> Tensor:
    """Whether a token's completion is off-policy beyond the bound and has a negative advantage, bool [T]."""
    difference = mean_by_sequence(rollout_logprobs - ratios.logprobs.detach(), ratios.microbatch)
    return (spread_over_tokens(difference, ratios.microbatch) > bound) & (ratios.advantages < 0)


def _penalties(
    outputs: TokenOutputs, values: dict[str, Tensor], microbatch: Microbatch, config: PolicyLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns each token's entropy and KL terms of the loss, [T], and their metrics."""
    penalties, per_token = torch.zeros_like(values["advantages"]), {}
    if outputs.entropy is not None:
        penalties = penalties - config.entropy * outputs.entropy.double()
        per_token["train/entropy"] = outputs.entropy
    if "ref_logprobs" in values:
        counted = microbatch.loss_mask
        ours = torch.where(counted, outputs.logprobs.double(), 0.0)
        reference = torch.where(counted, values["ref_logprobs"], 0.0)
        per_token["train/kl_ref"] = kl_estimate(ours, reference, config.kl.estimator)
        if config.kl.where == "loss":
            penalties = penalties + config.kl.coefficient * kl_loss(ours, reference, config.kl.estimator)
    return penalties, per_token


def _log_ratio(differences: Tensor, microbatch: Microbatch, config: PolicyLossConfig) -> Tensor:
    """Returns each token's log-ratio, [T], from differences of log-probabilities."""
    # Masked before exp: an overflow outside the mask would make gradients nan.
    log_ratio = torch.where(microbatch.loss_mask, differences, 0.0)
    if config.ratio == "token":
        return log_ratio
    # GSPO-token: the value is the sequence's, the gradient each token's own (arXiv 2507.18071, equation 14).
    of_sequence = spread_over_tokens(mean_by_sequence(log_ratio.detach(), microbatch), microbatch)
    return of_sequence + log_ratio - log_ratio.detach()


def _without_lost_tokens(microbatch: Microbatch) -> Microbatch:
    """Removes tokens from `loss_mask` whose generator log-probability is not finite."""
    if "rollout_logprobs" not in microbatch.values:
        return microbatch
    return dataclasses.replace(
        microbatch, loss_mask=microbatch.loss_mask & microbatch.values["rollout_logprobs"].isfinite()
    )


def _extremes(ratio: Tensor, old: Tensor, values: dict[str, Tensor], microbatch: Microbatch) -> dict[str, Any]:
    """Returns `LossOutput.largest` and `LossOutput.smallest`."""
    counted = microbatch.loss_mask
    largest = {RATIO_MAX: torch.where(counted, ratio, -torch.inf).max()}
    if "rollout_logprobs" in values:
        largest[MAX_ERROR] = largest_error(old, values["rollout_logprobs"], microbatch)
    return {"largest": largest, "smallest": {RATIO_MIN: torch.where(counted, ratio, torch.inf).min()}}


def _rollout_errors(old_logprobs: Tensor, values: dict[str, Tensor], microbatch: Microbatch) -> dict[str, Tensor]:
    """Returns per-token values [T] of metrics that compare generator and trainer, as far as their inputs are
    available."""
    if "rollout_logprobs" not in values:
        return {}
    rollout = values["rollout_logprobs"]
    errors = rollout_mismatch(old_logprobs, rollout, microbatch)
    errors["train/logprob_error"] = errors["train/token_mult_prob_error"]
    if "live_logprobs" in values:
        live = torch.where(microbatch.loss_mask, rollout - values["live_logprobs"], 0.0)
        errors["train/logprob_error_live"] = live.abs().exp()
    return errors


def _means(per_token: dict[str, Tensor], microbatch: Microbatch) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the sum over trained tokens of each metric, and their number."""
    count = microbatch.loss_mask.sum()
    return {name: (torch.where(microbatch.loss_mask, t.detach(), 0.0).sum(), count) for name, t in per_token.items()}


def _check_values(microbatch: Microbatch, config: PolicyLossConfig) -> None:
    needs = {
        "advantages": "every policy loss",
        "old_logprobs": "" if config.on_policy is True else f"on_policy={config.on_policy}",
        "rollout_logprobs": _setting_that_needs_rollout_logprobs(config),
        UNCERTAIN: "" if config.uncertain == 1 else f"uncertain={config.uncertain}",
        "ref_logprobs": (
            f"kl.coefficient={config.kl.coefficient}" if config.kl.coefficient and config.kl.where == "loss" else ""
        ),
    }
    for name, who in needs.items():
        if who and name not in microbatch.values:
            raise ValueError(f"{who} needs values['{name}'] in the microbatch, which has {sorted(microbatch.values)}")


def _setting_that_needs_rollout_logprobs(config: PolicyLossConfig) -> str:
    """Returns the setting that needs the generator's log-probabilities; empty if none does."""
    if config.off_policy_bound is not None:
        return f"off_policy_bound={config.off_policy_bound}"
    if config.correction.reject:
        return "correction.reject"
    return "" if config.correction.kind == "none" else f"correction.kind={config.correction.kind}"


def _normalise(loss: Tensor, microbatch: Microbatch, config: PolicyLossConfig) -> dict[Denominator, Tensor]:
    if config.normalise == "sequence":
        return {"sequences": sum_of_means(loss, microbatch)}
    total = torch.where(microbatch.loss_mask, loss, 0.0).sum()
    if config.normalise == "token":
        return {"tokens": total}
    if config.max_completion_tokens is None:
        raise ValueError("normalise=constant needs max_completion_tokens, the constant to divide by")
    return {"sequences": total / config.max_completion_tokens}


def uncertain_tokens(entropies: Sequence[Tensor], masks: Sequence[Tensor], share: float) -> list[Tensor]:
    """Selects the tokens with the highest entropies over all rows (Wang et al., arXiv:2506.01939).

    Args:
        entropies: the policy's entropy at each token, [n] per row.
        masks: trained tokens, bool [n] per row.
        share: fraction of trained tokens to select; the threshold is an interpolated quantile.

    Returns:
        float64 [n] per row, 1 or 0.

    Example:
        >>> import torch
        >>> uncertain_tokens([torch.tensor([9.0, 1.0, 3.0])], [torch.tensor([False, True, True])], 0.5)
        [tensor([0., 0., 1.], dtype=torch.float64)]
    """
    counted = torch.cat([of_row[mask] for of_row, mask in zip(entropies, masks, strict=True)]).double().sort().values
    if not len(counted):
        return [torch.zeros(len(mask), dtype=torch.float64) for mask in masks]
    place = (1 - share) * (len(counted) - 1)
    low = int(place)
    high = min(low + 1, len(counted) - 1)
    bound = torch.lerp(counted[low], counted[high], place - low)
    return [((of_row >= bound) & mask).double() for of_row, mask in zip(entropies, masks, strict=True)]
