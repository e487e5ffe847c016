"""Optimizer steps and forward-only work, the same on every layout."""

from automodel_rl.engine.engine import Engine, TrainOutput

__all__ = ["Engine", "TrainOutput"]
