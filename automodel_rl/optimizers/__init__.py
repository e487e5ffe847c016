"""Optimizers by name. Each description has its torch optimizers, its state in bytes and in files, and the
single-process optimizers with which `verify` compares."""

from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.optimizers.adamw import ADAMW
from automodel_rl.optimizers.adamw_8bit import ADAMW_8BIT
from automodel_rl.optimizers.description import COUNT, LR_FACTOR, OptimizerDescription, StateNames
from automodel_rl.optimizers.model_optimizer import AdamWSettings, ModelOptimizer
from automodel_rl.optimizers.muon import MUON
from automodel_rl.optimizers.schedule import learning_rate, warmup_steps

OPTIMIZERS: dict[OptimizerName, OptimizerDescription] = {
    "adamw": ADAMW,
    "adamw_8bit": ADAMW_8BIT,
    "muon": MUON,
}

__all__ = [
    "COUNT",
    "LR_FACTOR",
    "OPTIMIZERS",
    "AdamWSettings",
    "ModelOptimizer",
    "OptimizerDescription",
    "StateNames",
    "learning_rate",
    "warmup_steps",
]
