"""Supervised losses: negative log-likelihood of the trained tokens, optionally weighted per token."""

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.losses.outputs import LinearLoss, LossOutput, TokenOutputs


class SFTLoss(LinearLoss):
    """Computes -sum(log p(target)) over the tokens in `loss_mask` of a `microbatch`, from log-probabilities in
    `outputs`. Divided by their global number, this is the mean over tokens.

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
    """Computes -sum(sg(p(target)) log p(target)) over the tokens in `loss_mask` of a `microbatch`, where sg stops the
    gradient, from log-probabilities in `outputs` (dynamic fine-tuning; Wu et al., arXiv:2508.05629).

    The metric train/likelihood_loss is the mean of -log p(target).

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
"""Name of the value that weights tokens in `eaft_loss`."""


def _entropy_weights(microbatch: Microbatch) -> Tensor:
    return -microbatch.values[ENTROPY_WEIGHT] * microbatch.loss_mask


eaft_loss = LinearLoss(_entropy_weights, "tokens")
"""-sum(w log p(target)) over the tokens in `loss_mask`, with w from `entropy_weights` (entropy-adaptive fine-tuning,
arXiv:2601.02151)."""


def entropy_weights(logprobs: Tensor, power: float) -> Tensor:
    """Returns the entropy of the most likely tokens, renormalised, raised to `power`, [n], from their log-probabilities
    or logits [n, K]."""
    among = logprobs.log_softmax(1)
    return (-(among.exp() * among).sum(1)).clamp_min(0).pow(power)
