"""The whole configs of runs, those with data and those with rewards.

Only trainers and commands know them. Other rooms ask a run's config (config/run.py: RunConfig).
"""

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
