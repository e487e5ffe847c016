"""The whole configs of runs: supervised algorithms, and those with rollouts.

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
