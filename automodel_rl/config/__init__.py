"""Checked configs. Imports nothing heavy, so that help and config errors come at once."""

from automodel_rl.config.base import Section
from automodel_rl.config.checkpoint import CheckpointConfig
from automodel_rl.config.data import BatchConfig, DataConfig, SourceConfig
from automodel_rl.config.load import describe_keys, differing_keys, dump_config, load_config
from automodel_rl.config.model import ModelConfig
from automodel_rl.config.observe import ObserveConfig
from automodel_rl.config.optimizer import OptimizerConfig
from automodel_rl.config.parallel import ParallelConfig
from automodel_rl.config.sft import LengthConfig, SFTConfig

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "LengthConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "SFTConfig",
    "Section",
    "SourceConfig",
    "describe_keys",
    "differing_keys",
    "dump_config",
    "load_config",
]
