"""Preference losses over pairs. Chosen and rejected are adjacent in a microbatch, the chosen one first."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_rl.batch import Microbatch, spread_over_tokens, sum_by_sequence
from automodel_rl.config.losses import DPOLossConfig, Preference
from automodel_rl.losses.outputs import Denominator, LossOutput, TokenOutputs
from automodel_rl.losses.terms import check_pairs

LARGEST_EXPONENT = 40.0
"""Bound of exponents: exp of more overflows fp32, or loses all digits of what it is compared with."""


def dpo_loss(outputs: TokenOutputs, microbatch: Microbatch, config: DPOLossConfig) -> LossOutput:
    """Computes direct preference optimisation or a related loss. See `DPOLossConfig` for formulas and papers.

    Args:
        outputs: log-probabilities under the policy.
        microbatch: packed with `sequences_per_example=2`. `values` has `ref_logprobs`, log-probabilities under the
            reference, if the variant needs them.
        config: variant and settings.

    Returns:
        A sum over pairs, and one over the tokens of chosen completions if `sft_mean` is "token". Metrics, as means over
            pairs: train/accuracy, train/margin, train/reward_chosen, train/reward_rejected. A reward is beta times l of
            the (first) variant, as in `DPOLossConfig`.

    Raises:
        ValueError: adjacent sequences are not pairs, or `ref_logprobs` are missing.

    Example:
        >>> import torch
        >>> values = {"ref_logprobs": torch.zeros(3)}
        >>> sequence = TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]), values)
        >>> (microbatch,) = pack([sequence, sequence], capacity=8, sequences_per_example=2)
        >>> outputs = TokenOutputs(torch.tensor([-0.5, -1.5, 0.0, -0.5, -1.5, 0.0]))
        >>> round(dpo_loss(outputs, microbatch, DPOLossConfig()).sums["pairs"].item(), 4)  # log 2: no preference yet
        0.6931
    """
    check_pairs(microbatch)
    if config.needs_reference and "ref_logprobs" not in microbatch.values:
        raise ValueError(
            f"variant={next(iter(config.variants))} needs values['ref_logprobs'] in the microbatch: see "
            "Engine.add_logprobs"
        )
    scores, loss = {}, outputs.logprobs.new_zeros(microbatch.num_sequences // 2)
    for variant, weight in config.variants.items():
        scores[variant] = _scores(outputs.logprobs, microbatch, variant, config)
        chosen, rejected = scores[variant].unbind(1)
        loss = loss + weight * PREFERENCES[variant](chosen, rejected, config)
    chosen, rejected = next(iter(scores.values())).unbind(1)
    per_pair = {
        "train/accuracy": (chosen > rejected).to(loss.dtype),
        "train/margin": config.beta * (chosen - rejected),
        "train/reward_chosen": config.beta * chosen,
        "train/reward_rejected": config.beta * rejected,
    }
    sums: dict[Denominator, Tensor] = {"pairs": loss.sum()}
    if config.weight_of_sft:
        chosen_logprobs = _by_pair(outputs.logprobs, microbatch)[:, 0]
        if config.sft_mean == "token":
            sums["chosen_tokens"] = -config.weight_of_sft * chosen_logprobs.sum()
        else:
            per_token = chosen_logprobs / _num_tokens(outputs.logprobs, microbatch)[:, 0]
            sums["pairs"] = sums["pairs"] - config.weight_of_sft * per_token.sum()
    num_pairs = loss.new_tensor(float(len(loss)))
    metrics = {name: (value.detach().sum(), num_pairs) for name, value in per_pair.items()}
    return LossOutput(sums, metrics)


def _scores(logprobs: Tensor, microbatch: Microbatch, variant: Preference, config: DPOLossConfig) -> Tensor:
    """l of each completion, [pairs, 2]."""
    if config.compares_with_reference(variant):
        logprobs = logprobs - microbatch.values["ref_logprobs"]
    scores = _by_pair(logprobs * _weights(logprobs, microbatch, config), microbatch)
    return scores / _num_tokens(logprobs, microbatch) if config.averages(variant) else scores


def _weights(logprobs: Tensor, microbatch: Microbatch, config: DPOLossConfig) -> Tensor:
    """Weight of each token, [T]: `excess_weight` beyond the length of the pair's shorter completion, otherwise 1."""
    ones = torch.ones_like(logprobs)
    if config.excess_weight == 1.0 or not microbatch.num_sequences:
        return ones
    counted = microbatch.loss_mask.to(logprobs.dtype)
    lengths = sum_by_sequence(counted, microbatch)
    shorter = lengths.view(-1, 2).amin(1).repeat_interleave(2)
    before = counted.cumsum(0) - counted  # counted tokens of the microbatch before each
    of_earlier_sequences = lengths.cumsum(0) - lengths
    number = before - spread_over_tokens(of_earlier_sequences, microbatch)
    return ones.where(number < spread_over_tokens(shorter, microbatch), config.excess_weight)


def _num_tokens(logprobs: Tensor, microbatch: Microbatch) -> Tensor:
    """Number of trained tokens of each completion, at least 1, [pairs, 2]."""
    return _by_pair(torch.ones_like(logprobs), microbatch).clamp_min(1)


def _by_pair(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Sums values [T] over the trained tokens of each sequence: [pairs, 2]."""
    sums = sum_by_sequence(torch.where(microbatch.loss_mask, values, 0.0), microbatch)
    num_pairs = microbatch.num_sequences // 2
    return sums[: 2 * num_pairs].view(num_pairs, 2)


def _divergent(score: Tensor, config: DPOLossConfig) -> Tensor:
    """Transforms l for the configured divergence."""
    if config.divergence == "forward_kl":
        return -torch.expm1((-score).clamp_max(LARGEST_EXPONENT))
    return math.log(2) + F.logsigmoid(score) if config.divergence == "js" else score


def _of_margin(loss: Callable[[Tensor, DPOLossConfig], Tensor]) -> "PairLoss":
    """Wraps a loss that depends only on beta times the difference of the scores."""

    def of_pair(chosen: Tensor, rejected: Tensor, config: DPOLossConfig) -> Tensor:
        return loss(config.beta * (_divergent(chosen, config) - _divergent(rejected, config)), config)

    return of_pair


def _dpo(margin: Tensor, config: DPOLossConfig) -> Tensor:
    smoothing = config.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _robust(margin: Tensor, config: DPOLossConfig) -> Tensor:
    smoothing = config.label_smoothing
    right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
    return (-(1 - smoothing) * right + smoothing * wrong) / (1 - 2 * smoothing)


def _exo(margin: Tensor, config: DPOLossConfig) -> Tensor:
    right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
    of_right = right - math.log1p(-config.label_smoothing)
    return right.exp() * of_right + wrong.exp() * (wrong - math.log(config.label_smoothing))


def _discopop(margin: Tensor, config: DPOLossConfig) -> Tensor:
    share = torch.sigmoid(margin / config.tau)
    # Summed as logarithms: exp(-margin) alone would overflow where its share is 0.
    return -F.logsigmoid(margin) * (1 - share) + (F.logsigmoid(margin / config.tau) - margin).exp()


def _ipo(chosen: Tensor, rejected: Tensor, config: DPOLossConfig) -> Tensor:
    return (chosen - rejected - 1 / (2 * config.beta)).square()


def _simpo(chosen: Tensor, rejected: Tensor, config: DPOLossConfig) -> Tensor:
    def shaped(score: Tensor) -> Tensor:
        if not config.alpha:
            return score
        return -torch.expm1((-config.alpha * score).clamp_max(LARGEST_EXPONENT)) / config.alpha

    return -F.logsigmoid(config.beta * (shaped(chosen) - shaped(rejected)) - config.gamma)


def _orpo(chosen: Tensor, rejected: Tensor, config: DPOLossConfig) -> Tensor:
    def log_odds(score: Tensor) -> Tensor:
        # The odds of probability 1 are infinite, so clamp to the largest probability below 1.
        certain = -torch.finfo(score.dtype).eps
        return score - torch.log(-torch.expm1(score.clamp_max(certain)))

    return -config.beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def _nca(chosen: Tensor, rejected: Tensor, config: DPOLossConfig) -> Tensor:
    chosen, rejected = config.beta * chosen, config.beta * rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _bco(chosen: Tensor, rejected: Tensor, config: DPOLossConfig) -> Tensor:
    return -F.logsigmoid(config.beta * chosen) - F.logsigmoid(-config.beta * rejected)


def _sppo(chosen: Tensor, rejected: Tensor, config: DPOLossConfig) -> Tensor:
    half = 1 / (2 * config.beta)
    return (chosen - half).square() + (rejected + half).square()


def _apo_zero(chosen: Tensor, rejected: Tensor, config: DPOLossConfig) -> Tensor:
    return torch.sigmoid(-config.beta * chosen) + torch.sigmoid(config.beta * rejected)


def _apo_down(chosen: Tensor, rejected: Tensor, config: DPOLossConfig) -> Tensor:
    return torch.sigmoid(config.beta * chosen) + torch.sigmoid(-config.beta * (chosen - rejected))


PairLoss = Callable[[Tensor, Tensor, DPOLossConfig], Tensor]
"""(l of chosen completions [pairs], l of rejected ones [pairs], settings) -> losses [pairs]."""

PREFERENCES: dict[Preference, PairLoss] = {
    "dpo": _of_margin(_dpo),
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
    "hinge": _of_margin(lambda margin, _: torch.relu(1 - margin)),
    "robust": _of_margin(_robust),
    "exo": _of_margin(_exo),
    "nca": _nca,
    "bco": _bco,
    "sppo": _sppo,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _of_margin(_discopop),
}
"""The variants of `DPOLossConfig`, which has formulas and papers."""
