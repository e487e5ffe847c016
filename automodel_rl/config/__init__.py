"""Checked config sections. Imports nothing slow, so that help and config errors appear at once."""

from automodel_rl.config.base import Section
from automodel_rl.config.components import ComponentsConfig, EncoderComponent, LanguageComponent
from automodel_rl.config.data import (
    BatchConfig,
    DataConfig,
    PairBatchConfig,
    PolicyBatchConfig,
    PromptDataConfig,
    SourceConfig,
)
from automodel_rl.config.keys import Key, describe_keys
from automodel_rl.config.launch import LaunchConfig, RayConfig
from automodel_rl.config.load import (
    ALGORITHMS,
    completed,
    config_of_model,
    differing_keys,
    dump_config,
    load_config,
    load_serve_config,
)
from automodel_rl.config.losses import (
    AdvantageConfig,
    CorrectionConfig,
    DPOLossConfig,
    KLConfig,
    KTOLossConfig,
    PolicyLossConfig,
    RejectConfig,
    RewardLossConfig,
    SFTLossConfig,
)
from automodel_rl.config.model import (
    IndexerConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    OffloadConfig,
)
from automodel_rl.config.optimizer import MuonConfig, OptimizerConfig, ParameterGroupConfig
from automodel_rl.config.parallel import ParallelConfig
from automodel_rl.config.rollout import FilterConfig, RewardConfig, RolloutConfig, WeightSyncConfig
from automodel_rl.config.run import AnyRun, CheckpointConfig, LengthConfig, ObserveConfig, RolloutRunConfig, RunConfig
from automodel_rl.config.serve import ServeConfig, ServeLimitsConfig

__all__ = [
    "ALGORITHMS",
    "AdvantageConfig",
    "AnyRun",
    "BatchConfig",
    "CheckpointConfig",
    "ComponentsConfig",
    "CorrectionConfig",
    "DPOLossConfig",
    "DataConfig",
    "EncoderComponent",
    "FilterConfig",
    "IndexerConfig",
    "KLConfig",
    "KTOLossConfig",
    "Key",
    "LanguageComponent",
    "LaunchConfig",
    "LengthConfig",
    "LoraConfig",
    "MTPConfig",
    "MemoryConfig",
    "MoEConfig",
    "ModelConfig",
    "MuonConfig",
    "ObserveConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "PairBatchConfig",
    "ParallelConfig",
    "ParameterGroupConfig",
    "PolicyBatchConfig",
    "PolicyLossConfig",
    "PromptDataConfig",
    "RayConfig",
    "RejectConfig",
    "RewardConfig",
    "RewardLossConfig",
    "RolloutConfig",
    "RolloutRunConfig",
    "RunConfig",
    "SFTLossConfig",
    "Section",
    "ServeConfig",
    "ServeLimitsConfig",
    "SourceConfig",
    "WeightSyncConfig",
    "completed",
    "config_of_model",
    "describe_keys",
    "differing_keys",
    "dump_config",
    "load_config",
    "load_serve_config",
]
