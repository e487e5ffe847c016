"""Losses over microbatches, as pure tensor functions."""

from automodel_rl.losses.distill import distill_loss
from automodel_rl.losses.dpo import dpo_loss
from automodel_rl.losses.kto import kto_loss
from automodel_rl.losses.outputs import (
    UNDIVIDED,
    Denominator,
    LinearLoss,
    LossFn,
    LossOutput,
    Readout,
    TokenOutputs,
    count,
)
from automodel_rl.losses.policy_gradient import grpo_loss
from automodel_rl.losses.reward import reward_loss
from automodel_rl.losses.sft import dft_loss, sft_loss
from automodel_rl.losses.token_losses import TOKEN_LOSSES, token_loss
from automodel_rl.losses.value import value_loss

__all__ = [
    "TOKEN_LOSSES",
    "UNDIVIDED",
    "Denominator",
    "LinearLoss",
    "LossFn",
    "LossOutput",
    "Readout",
    "TokenOutputs",
    "count",
    "dft_loss",
    "distill_loss",
    "dpo_loss",
    "grpo_loss",
    "kto_loss",
    "reward_loss",
    "sft_loss",
    "token_loss",
    "value_loss",
]
