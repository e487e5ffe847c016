"""The policy-gradient family: one loss, with GRPO, DAPO, GSPO, CISPO and others as settings."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch, spread_over_tokens
from automodel_rl.config.losses import CorrectionConfig, PolicyLossConfig
from automodel_rl.losses.disagreement import (
    MAX_ERROR,
    OUT_OF_BOUNDS,
    RATIO_MAX,
    RATIO_MIN,
    SQUARE_OF_WEIGHT,
    WEIGHT,
    disagreement,
    largest_error,
    out_of_bounds,
)
from automodel_rl.losses.outputs import Denominator, LossOutput, TokenOutputs
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
"""Name of values: 1 for tokens that have a policy term, and 0 for others, [T]."""


def grpo_loss(outputs: TokenOutputs, microbatch: Microbatch, config: PolicyLossConfig) -> LossOutput:
    """A policy-gradient loss over completions. Formulas and papers are in `PolicyLossConfig`.

    Args:
        outputs: log-probabilities under the policy, and its entropy.
        microbatch: `loss_mask` marks the completions' tokens. `values` has `advantages`, `old_logprobs` unless
            `on_policy` is True, `rollout_logprobs` if there is a correction, `ref_logprobs` if there is a KL term, and
            `uncertain` (`uncertain_tokens`) if there is such a share.
            If `rollout_logprobs` are there, a metric says how far they are from the trainer's log-probabilities. If
            `live_logprobs` (those without router replay) are there, a second metric says how far they are from these.
        config: the settings of the loss.

    Returns:
        A sum over tokens, or over sequences, float64. A token whose `rollout_logprobs` is no finite number counts
        nowhere in it, nor in the mean ratio of its sequence, nor in metrics. What divides the sum is counted outside,
        by `loss_mask`; a trainer takes such tokens out of `loss_mask`, too.

        Metrics: means over tokens of train/ratio_mean, train/clip_fraction, train/entropy, train/kl_ref,
        train/correction_weight and its square; train/ratio_max and train/ratio_min; how far the generator is from the
        trainer, in train/logprob_error, train/logprob_error_live and by the formulas of losses/disagreement.py.

    Raises:
        ValueError: the input of a term is missing, or the config normalises by a constant that it does not give.

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
    # In float64: a ratio of fp32 overflows at a log-ratio of 89. These are numbers per token, which are few.
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
    """The weights of a correction, [T], values of tokens for metrics that are their means, and metrics; None without
    one."""
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
    """Whether a token's completion is worse than others, and so unlikely now that it is left out, bool [T]."""
    difference = mean_by_sequence(rollout_logprobs - ratios.logprobs.detach(), ratios.microbatch)
    return (spread_over_tokens(difference, ratios.microbatch) > bound) & (ratios.advantages < 0)


def _penalties(
    outputs: TokenOutputs, values: dict[str, Tensor], microbatch: Microbatch, config: PolicyLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """What entropy and the divergence from the reference add to each token's loss, [T], and their metrics."""
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
    """The logarithm of each token's ratio, [T], from differences of log-probabilities."""
    # Masked before exp: an overflow outside of the mask would still spoil gradients.
    log_ratio = torch.where(microbatch.loss_mask, differences, 0.0)
    if config.ratio == "token":
        return log_ratio
    # GSPO-token: the value is the sequence's, the gradient each token's own (arXiv 2507.18071, equation 14).
    of_sequence = spread_over_tokens(mean_by_sequence(log_ratio.detach(), microbatch), microbatch)
    return of_sequence + log_ratio - log_ratio.detach()


def _without_lost_tokens(microbatch: Microbatch) -> Microbatch:
    """The microbatch without tokens in `loss_mask` whose log-probability the generator did not give as a number."""
    if "rollout_logprobs" not in microbatch.values:
        return microbatch
    return dataclasses.replace(
        microbatch, loss_mask=microbatch.loss_mask & microbatch.values["rollout_logprobs"].isfinite()
    )


def _extremes(ratio: Tensor, old: Tensor, values: dict[str, Tensor], microbatch: Microbatch) -> dict[str, Any]:
    """`LossOutput.largest` and `LossOutput.smallest`."""
    counted = microbatch.loss_mask
    largest = {RATIO_MAX: torch.where(counted, ratio, -torch.inf).max()}
    if "rollout_logprobs" in values:
        largest[MAX_ERROR] = largest_error(old, values["rollout_logprobs"], microbatch)
    return {"largest": largest, "smallest": {RATIO_MIN: torch.where(counted, ratio, torch.inf).min()}}


def _rollout_errors(old_logprobs: Tensor, values: dict[str, Tensor], microbatch: Microbatch) -> dict[str, Tensor]:
    """Values of tokens, [T], for each metric that compares generator and trainer, as far as the microbatch has both."""
    if "rollout_logprobs" not in values:
        return {}
    rollout = values["rollout_logprobs"]
    errors = disagreement(old_logprobs, rollout, microbatch)
    errors["train/logprob_error"] = errors["train/token_mult_prob_error"]
    if "live_logprobs" in values:
        live = torch.where(microbatch.loss_mask, rollout - values["live_logprobs"], 0.0)
        errors["train/logprob_error_live"] = live.abs().exp()
    return errors


def _means(per_token: dict[str, Tensor], microbatch: Microbatch) -> dict[str, tuple[Tensor, Tensor]]:
    """The sum over the counted tokens for each metric, and the number of these tokens."""
    count = microbatch.loss_mask.sum()
    return {name: (torch.where(microbatch.loss_mask, t.detach(), 0.0).sum(), count) for name, t in per_token.items()}


def _check_values(microbatch: Microbatch, config: PolicyLossConfig) -> None:
    needs = {
        "advantages": "every policy loss",
        "old_logprobs": "" if config.on_policy is True else f"on_policy={config.on_policy}",
        "rollout_logprobs": _who_compares_with_rollouts(config),
        UNCERTAIN: "" if config.uncertain == 1 else f"uncertain={config.uncertain}",
        "ref_logprobs": (
            f"kl.coefficient={config.kl.coefficient}" if config.kl.coefficient and config.kl.where == "loss" else ""
        ),
    }
    for name, who in needs.items():
        if who and name not in microbatch.values:
            raise ValueError(f"{who} needs values['{name}'] in the microbatch, which has {sorted(microbatch.values)}")


def _who_compares_with_rollouts(config: PolicyLossConfig) -> str:
    """The setting that needs the generator's log-probabilities; empty if none does."""
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
    """Whether each token of each row is among those with the highest entropies of all rows (Wang et al.,
    arXiv:2506.01939).

    Args:
        entropies: the policy's entropy over each token of each row, [n].
        masks: the tokens that count, bool [n].
        share: the share of counted tokens that are asked for; the quantile between two of them is interpolated.

    Returns:
        float64 [n] for each row, 1 or 0.

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
