"""Complete configs of all algorithms, for trainers and commands. Other rooms use only `RunConfig` (config/run.py)."""

from automodel_rl.config.algorithms.online import GRPOConfig, OnlineConfig, PPOConfig
from automodel_rl.config.algorithms.supervised import DistillConfig, DPOConfig, KTOConfig, RewardModelConfig, SFTConfig

__all__ = [
    "DPOConfig",
    "DistillConfig",
    "GRPOConfig",
    "KTOConfig",
    "OnlineConfig",
    "PPOConfig",
    "RewardModelConfig",
    "SFTConfig",
]
