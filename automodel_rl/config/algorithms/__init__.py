"""The whole configs of runs, one file for each algorithm.

Only trainers and commands know them. Other rooms ask a run's config (config/run.py: RunConfig).
"""

from automodel_rl.config.algorithms.distill import DistillConfig
from automodel_rl.config.algorithms.dpo import DPOConfig
from automodel_rl.config.algorithms.grpo import GRPOConfig
from automodel_rl.config.algorithms.kto import KTOConfig
from automodel_rl.config.algorithms.online import OnlineConfig
from automodel_rl.config.algorithms.ppo import PPOConfig
from automodel_rl.config.algorithms.reward import RewardModelConfig
from automodel_rl.config.algorithms.sft import SFTConfig

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
