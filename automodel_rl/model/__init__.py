"""The model on its layout: loading, forward, log-probabilities, saving."""

from automodel_rl.model.handle import ModelHandle

__all__ = ["ModelHandle"]
