"""Losses over microbatches: pure tensor functions."""

from automodel_rl.losses.dpo import dpo_loss
from automodel_rl.losses.outputs import Denominator, LinearLoss, LossFn, LossOutput, Readout, TokenOutputs, count
from automodel_rl.losses.policy_gradient import grpo_loss
from automodel_rl.losses.sft import sft_loss

__all__ = [
    "Denominator",
    "LinearLoss",
    "LossFn",
    "LossOutput",
    "Readout",
    "TokenOutputs",
    "count",
    "dpo_loss",
    "grpo_loss",
    "sft_loss",
]
