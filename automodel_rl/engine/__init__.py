"""Optimizer steps, forward-only work and checkpoints, the same on every layout."""

from automodel_rl.engine.engine import Engine, TrainOutput

__all__ = ["Engine", "TrainOutput"]
