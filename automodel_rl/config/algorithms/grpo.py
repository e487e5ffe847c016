"""The whole config of a reinforcement-learning run that compares completions in groups, or with teachers."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from automodel_rl.config.algorithms.online import OnlineConfig
from automodel_rl.config.distillation import OnPolicyDistillationConfig
from automodel_rl.config.further_models import FurtherModel, TeacherConfig, check_can_compare, local
from automodel_rl.config.losses import AdvantageConfig


class GRPOConfig(OnlineConfig):
    """A run of reinforcement learning. `automodel-rl grpo --help` lists every key.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "prompts.jsonl"}]}}
        >>> values |= {"rewards": [{"function": "math"}], "batch": {"microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> values |= {"rollout": {"prompts": 8, "group_size": 4, "max_prompt_tokens": 512, "max_new_tokens": 512}}
        >>> GRPOConfig(output="runs/mine", **values).advantage.kind
        'grpo'
    """

    algorithm: Literal["grpo"] = "grpo"
    """Reinforcement learning on prompts with rewards: GRPO and its relatives; with teachers on-policy distillation."""

    advantage: AdvantageConfig = AdvantageConfig()

    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Models that judge every token that the policy writes, by names of your choice; with rewards or without. Each
    teaches the sources of prompts that it names."""

    distillation: OnPolicyDistillationConfig = OnPolicyDistillationConfig()

    @property
    def further_models(self) -> dict[str, FurtherModel]:
        """The teachers on the run's ranks by name."""
        return local(self.teachers, self.model)

    @property
    def compares_completions(self) -> bool:
        """Whether only rewards teach something, by comparison in groups."""
        return not self.teachers

    @property
    def weights_alone(self) -> tuple[float, ...]:
        """The weights of rewards that are each compared alone; empty if their sum is compared."""
        return tuple(reward.weight for reward in self.rewards) if self.advantage.kind == "gdpo" else ()

    @property
    def reads_old_logprobs(self) -> bool:
        """Whether advantages need log-probabilities from before the optimizer step."""
        return (bool(self.teachers) and self.distillation.loss is None) or super().reads_old_logprobs

    @field_validator("distillation")
    @classmethod
    def _at_the_temperature_of_rollouts(
        cls, distillation: OnPolicyDistillationConfig, info: ValidationInfo
    ) -> OnPolicyDistillationConfig:
        """The divergence has the temperature of rollouts if it names none."""
        loss, rollout = distillation.loss, info.data.get("rollout")
        if loss is None or rollout is None or "temperature" in loss.model_fields_set:
            return distillation
        return distillation.model_copy(update={"loss": loss.model_copy(update={"temperature": rollout.temperature})})

    @model_validator(mode="after")
    def _rewards_alone(self) -> "GRPOConfig":
        if self.advantage.kind == "gdpo":
            key = "filter.overlong_buffer" if self.filter.overlong_buffer else "loss.kl.where=reward"
            if self.filter.overlong_buffer or self.has_kl_in_reward:
                raise ValueError(f"advantage.kind=gdpo compares each reward alone, and {key} is none: leave it out")
            if len(self.rewards) < 2:
                raise ValueError("advantage.kind=gdpo compares each of several rewards alone: name two, or use grpo")
        return self

    @model_validator(mode="after")
    def _teachers_are_asked(self) -> "GRPOConfig":
        if not self.teachers and self.distillation != OnPolicyDistillationConfig():
            raise ValueError("distillation: there are no teachers: name one in teachers, or leave it out")
        divergence = self.distillation.loss
        check_can_compare(self.teachers, divergence, self.rollout.temperature)
        if divergence is not None and divergence.temperature != self.rollout.temperature:
            raise ValueError(
                f"distillation.loss.temperature={divergence.temperature:g} with rollout.temperature="
                f"{self.rollout.temperature:g}: one pass reads both at one temperature: give them the same"
            )
        if self.rollout.group_size == 1 and (self.has_kl_in_reward or self.filter.overlong_buffer):
            key = "loss.kl.where=reward" if self.has_kl_in_reward else "filter.overlong_buffer"
            raise ValueError(
                f"rollout.group_size=1 with {key}: it changes rewards, which are compared within their group: use at "
                "least 2, or loss.kl.where=loss and no buffer"
            )
        if self.rewards and self.rollout.group_size == 1:
            raise ValueError("rollout.group_size=1: rewards are compared within their group: use at least 2")
        return self
