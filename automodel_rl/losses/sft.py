"""Supervised fine-tuning: negative log-likelihood of the trained tokens, and the same with a weight for each."""

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.losses.outputs import LinearLoss, LossOutput, TokenOutputs


class SFTLoss(LinearLoss):
    """-sum of log p(target) over the tokens in `loss_mask`; divided by their global number it is the token mean.

    Args:
        outputs: log-probabilities under the model.
        microbatch: the microbatch that they are for.

    Returns:
        A sum over tokens.

    Example:
        >>> import torch
        >>> sequence = TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]))
        >>> (microbatch,) = pack([sequence], capacity=8)
        >>> outputs = TokenOutputs(torch.tensor([-0.5, -1.5, 0.0]))
        >>> sft_loss(outputs, microbatch).sums["tokens"].item()
        2.0
    """


def _weights(microbatch: Microbatch) -> Tensor:
    return -microbatch.loss_mask.float()


sft_loss = SFTLoss(_weights, "tokens")


def dft_loss(outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
    """-sum of p(target) log p(target) over the tokens in `loss_mask`, without a gradient of p (dynamic fine-tuning; Wu
    et al., arXiv:2508.05629).

    Args:
        outputs: log-probabilities under the model.
        microbatch: the microbatch that they are for.

    Returns:
        A sum over tokens. Its metric train/likelihood_loss is the mean of -log p(target).

    Example:
        >>> import torch
        >>> sequence = TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]))
        >>> (microbatch,) = pack([sequence], capacity=8)
        >>> outputs = TokenOutputs(torch.tensor([-0.5, -1.5, 0.0]))
        >>> round(dft_loss(outputs, microbatch).sums["tokens"].item(), 4)
        0.638
    """
    counted = torch.where(microbatch.loss_mask, outputs.logprobs, 0.0)
    likelihood = -counted.detach().sum(), microbatch.loss_mask.sum()
    return LossOutput({"tokens": -(counted.detach().exp() * counted).sum()}, {"train/likelihood_loss": likelihood})


ENTROPY_WEIGHT = "entropy_weight"
"""Name of the value with which `eaft_loss` weighs a token."""


def _entropy_weights(microbatch: Microbatch) -> Tensor:
    return -microbatch.values[ENTROPY_WEIGHT] * microbatch.loss_mask


eaft_loss = LinearLoss(_entropy_weights, "tokens")
"""-sum of w log p(target) over the tokens in `loss_mask`, with w of `entropy_weights` (entropy-adaptive fine-tuning,
arXiv:2601.02151)."""


def entropy_weights(logprobs: Tensor, power: float) -> Tensor:
    """The entropy of the likeliest tokens among themselves, to a power.

    Args:
        logprobs: log-probabilities, or logits, of the likeliest tokens at each place, [n, K].
        power: the power.

    Returns:
        [n].
    """
    among = logprobs.log_softmax(1)
    return (-(among.exp() * among).sum(1)).clamp_min(0).pow(power)
