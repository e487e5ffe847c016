"""Post-training of Hugging Face language models in plain PyTorch, on any parallel layout, with packed sequences.

The public names are imported on first use, so that `import automodel_rl` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from automodel_rl.batch import PackedBatch, TokenSequence, pack
    from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, load_config
    from automodel_rl.engine import Engine, TrainOutput
    from automodel_rl.losses import LossOutput, TokenOutputs, sft_loss
    from automodel_rl.model.handle import ModelHandle
    from automodel_rl.trainers.sft import SFTTrainer

_HOMES = {
    "PackedBatch": "batch",
    "TokenSequence": "batch",
    "pack": "batch",
    "ModelConfig": "config",
    "OptimizerConfig": "config",
    "ParallelConfig": "config",
    "load_config": "config",
    "Engine": "engine",
    "TrainOutput": "engine",
    "LossOutput": "losses",
    "TokenOutputs": "losses",
    "sft_loss": "losses",
    "ModelHandle": "model.handle",
    "SFTTrainer": "trainers.sft",
}

__all__ = [
    "Engine",
    "LossOutput",
    "ModelConfig",
    "ModelHandle",
    "OptimizerConfig",
    "PackedBatch",
    "ParallelConfig",
    "SFTTrainer",
    "TokenOutputs",
    "TokenSequence",
    "TrainOutput",
    "load_config",
    "pack",
    "sft_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'automodel_rl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"automodel_rl.{_HOMES[name]}"), name)
