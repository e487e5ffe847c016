"""Preference losses over pairs: chosen and rejected are neighbours in a microbatch, the chosen one first."""

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_rl.batch import Microbatch, sum_by_sequence
from automodel_rl.config.losses import DPOLossConfig
from automodel_rl.losses.outputs import LossOutput, TokenOutputs


def dpo_loss(outputs: TokenOutputs, microbatch: Microbatch, config: DPOLossConfig) -> LossOutput:
    """Direct preference optimisation and its relatives. Formulas and papers are in `DPOLossConfig`.

    Args:
        outputs: log-probabilities under the policy.
        microbatch: packed with `together=2`. `values["ref_logprobs"]` has the log-probabilities under the reference,
            unless the variant needs none.
        config: the variant of the loss and its settings.

    Returns:
        A sum over pairs. Metrics, all of them means over pairs: train/accuracy, train/margin, train/reward_chosen,
        train/reward_rejected. A reward is beta times the l of `DPOLossConfig`.

    Raises:
        ValueError: the microbatch's neighbours are no pairs, or the variant compares with a reference and the
            microbatch has no `ref_logprobs`.

    Example:
        >>> import torch
        >>> values = {"ref_logprobs": torch.zeros(3)}
        >>> sequence = TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]), values)
        >>> (microbatch,) = pack([sequence, sequence], capacity=8, together=2)
        >>> outputs = TokenOutputs(torch.tensor([-0.5, -1.5, 0.0, -0.5, -1.5, 0.0]))
        >>> round(dpo_loss(outputs, microbatch, DPOLossConfig()).sums["pairs"].item(), 4)  # log 2: no preference yet
        0.6931
    """
    _check_pairs(microbatch)
    if config.needs_reference and "ref_logprobs" not in microbatch.values:
        raise ValueError(
            f"variant={config.variant} needs values['ref_logprobs'] in the microbatch: see Engine.add_logprobs"
        )
    ours = _by_pair(outputs.logprobs, microbatch)
    lengths = _by_pair(torch.ones_like(outputs.logprobs), microbatch).clamp_min(1)
    scores = (
        _by_pair(outputs.logprobs - microbatch.values["ref_logprobs"], microbatch) if config.needs_reference else ours
    )
    if config.length_normalised or config.variant != "dpo":
        scores = scores / lengths
    chosen, rejected = scores.unbind(1)
    loss = _preference(chosen - rejected, config)
    if config.sft_weight:
        loss = loss - config.sft_weight * ours[:, 0] / lengths[:, 0]
    per_pair = {
        "train/accuracy": (chosen > rejected).to(loss.dtype),
        "train/margin": config.beta * (chosen - rejected),
        "train/reward_chosen": config.beta * chosen,
        "train/reward_rejected": config.beta * rejected,
    }
    num_pairs = loss.new_tensor(float(len(loss)))
    metrics = {name: (value.detach().sum(), num_pairs) for name, value in per_pair.items()}
    return LossOutput(sums={"pairs": loss.sum()}, metrics=metrics)


def _check_pairs(microbatch: Microbatch) -> None:
    """Raises ValueError if neighbours are no pair: neighbours in the packed list, the first at an even place."""
    order = microbatch.order
    pairs = zip(order[::2], order[1::2], strict=False)
    if len(order) % 2 or any(chosen % 2 or rejected != chosen + 1 for chosen, rejected in pairs):
        raise ValueError(
            f"a microbatch holds the sequences {list(order)} of those that were packed, which are no whole pairs: use "
            "pack(..., together=2), with every chosen completion before its rejected one"
        )


def _preference(margin: Tensor, config: DPOLossConfig) -> Tensor:
    if config.variant == "ipo":
        return (margin - 1 / (2 * config.beta)).square()
    if config.variant == "simpo":
        return -F.logsigmoid(config.beta * margin - config.gamma)
    right, wrong = F.logsigmoid(config.beta * margin), F.logsigmoid(-config.beta * margin)
    return -(1 - config.label_smoothing) * right - config.label_smoothing * wrong


def _by_pair(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Sums of values [T] over the counted tokens of each sequence, [pairs, 2]. An empty microbatch has no pair."""
    sums = sum_by_sequence(torch.where(microbatch.loss_mask, values, 0.0), microbatch)
    num_pairs = microbatch.num_sequences // 2
    return sums[: 2 * num_pairs].view(num_pairs, 2)
