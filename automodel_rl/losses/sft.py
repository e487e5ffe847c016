"""Supervised fine-tuning: negative log-likelihood of the trained tokens."""

from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.losses.outputs import LinearLoss


def _weights(microbatch: Microbatch) -> Tensor:
    return -microbatch.loss_mask.float()


sft_loss = LinearLoss(_weights, "tokens")
"""-sum of log p(target) over the tokens in `loss_mask`; divided by their global number it is the token mean."""
