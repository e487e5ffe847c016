"""The whole config of a reinforcement-learning run."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.data import PolicyBatchConfig, PromptDataConfig
from automodel_rl.config.losses import AdvantageConfig, PolicyLossConfig
from automodel_rl.config.rollout import FilterConfig, RewardConfig, RolloutConfig
from automodel_rl.config.run import RunConfig, refuse_idle_data_ranks


class GRPOConfig(RunConfig):
    algorithm: Literal["grpo"] = "grpo"
    """Reinforcement learning on prompts with rewards: GRPO and its relatives."""

    data: PromptDataConfig
    batch: PolicyBatchConfig
    rollout: RolloutConfig
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)]
    """Functions whose weighted sum is a completion's reward."""

    filter: FilterConfig = FilterConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: PolicyLossConfig = PolicyLossConfig()

    @property
    def sequences_per_step(self) -> int:
        return self.rollout.prompts * self.rollout.group_size // self.batch.updates

    @property
    def needs_reference(self) -> bool:
        return self.loss.kl.coefficient > 0

    @model_validator(mode="after")
    def _sizes(self) -> "GRPOConfig":
        rollout, batch = self.rollout, self.batch
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens
        if batch.row_tokens < longest:
            raise ValueError(
                f"batch.row_tokens={batch.row_tokens} must hold the longest prompt and completion, "
                f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}: raise it, or lower one of these"
            )
        if rollout.prompts % batch.updates:
            raise ValueError(
                f"batch.updates={batch.updates} must divide rollout.prompts={rollout.prompts}: change one of them"
            )
        if rollout.group_size == 1:
            raise ValueError("rollout.group_size=1: completions are compared within their group: use at least 2")
        if self.loss.on_policy and batch.updates > 1:
            raise ValueError(
                f"loss.on_policy=true with batch.updates={batch.updates}: later updates are off-policy: set it to "
                "false, or use one update"
            )
        if self.loss.on_policy and self.loss.kl.coefficient and self.loss.kl.where == "reward":
            raise ValueError(
                "loss.kl.where=reward with loss.on_policy=true: the reward needs log-probabilities from before the "
                "update: set on_policy to false, or where to loss"
            )
        product = "rollout.prompts x rollout.group_size / batch.updates"
        refuse_idle_data_ranks(product, self.sequences_per_step, self.parallel)
        return self
