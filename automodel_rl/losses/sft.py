"""Supervised fine-tuning: negative log-likelihood of the trained tokens."""

import torch

from automodel_rl.batch import PackedBatch
from automodel_rl.losses.outputs import LossOutput, TokenOutputs


def sft_loss(outputs: TokenOutputs, batch: PackedBatch) -> LossOutput:
    """-sum of log p(target) over the tokens in `loss_mask`; divided by their global number it is the token mean."""
    return LossOutput(sums={"tokens": -torch.where(batch.loss_mask, outputs.logprobs, 0.0).sum()})
