"""Losses over packed rows: pure tensor functions."""

from automodel_rl.losses.outputs import Denominator, LossFn, LossOutput, TokenOutputs, count
from automodel_rl.losses.sft import sft_loss

__all__ = ["Denominator", "LossFn", "LossOutput", "TokenOutputs", "count", "sft_loss"]
