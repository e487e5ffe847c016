"""The whole config of a reinforcement-learning run with a critic."""

from typing import Literal

from pydantic import model_validator

from automodel_rl.config.algorithms.online import OnlineConfig
from automodel_rl.config.critic import CriticConfig, GAEConfig
from automodel_rl.config.further_models import FurtherModel


class PPOConfig(OnlineConfig):
    """A run of reinforcement learning with a critic. `automodel-rl ppo --help` lists every key.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "prompts.jsonl"}]}}
        >>> values |= {"rewards": [{"function": "math"}], "batch": {"microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> values |= {"rollout": {"prompts": 8, "group_size": 1, "max_prompt_tokens": 512, "max_new_tokens": 512}}
        >>> PPOConfig(output="runs/mine", **values).gae.gae_lambda
        0.95
    """

    algorithm: Literal["ppo"] = "ppo"
    """Reinforcement learning on prompts with rewards and a critic (PPO; Schulman et al., arXiv:1707.06347)."""

    gae: GAEConfig = GAEConfig()
    critic: CriticConfig = CriticConfig()

    @property
    def further_models(self) -> dict[str, FurtherModel]:
        """The critic."""
        return {"critic": self.critic.further_model(self.model)}

    @property
    def compares_completions(self) -> bool:
        """Whether a completion's advantage comes from the rewards of others: it comes from the critic."""
        return False

    @model_validator(mode="after")
    def _has_rewards(self) -> "PPOConfig":
        if not self.rewards:
            raise ValueError("rewards: name at least one, such as math, or package.module:function")
        steps = self.length.steps
        if steps is not None and self.critic.warmup_steps >= steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} with length.steps={steps}: the policy would never be "
                "trained: lower the former"
            )
        return self
