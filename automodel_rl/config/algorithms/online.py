"""Configs of runs with rollouts: grpo, ppo, and their common base."""

import itertools
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from automodel_rl.config.critic import CriticConfig, GAEConfig
from automodel_rl.config.data import PolicyBatchConfig
from automodel_rl.config.distillation import OnPolicyDistillationConfig
from automodel_rl.config.further_models import FurtherModel, TeacherConfig, check_can_compare, local
from automodel_rl.config.losses import AdvantageConfig, PolicyLossConfig
from automodel_rl.config.rollout import ENVIRONMENT, NEED_ANSWER, FilterConfig, RewardConfig
from automodel_rl.config.run import RolloutRunConfig, refuse_idle_data_ranks

RESERVED_NAMES = ("mean", "std", "errors")
"""Metric names for all rewards together, which no single reward may have."""


class OnlineConfig(RolloutRunConfig):
    """Common keys and rules of runs that learn from their own completions and rewards."""

    batch: PolicyBatchConfig = PolicyBatchConfig()
    rewards: tuple[RewardConfig, ...] = ()
    """Reward functions, whose weighted sum is a completion's reward."""

    filter: FilterConfig = FilterConfig()
    loss: PolicyLossConfig = PolicyLossConfig()

    @property
    def answer_reader(self) -> str | None:
        """The built-in reward that compares with a record's `answer`; None if there is none."""
        return next((reward.function for reward in self.rewards if reward.function in NEED_ANSWER), None)

    @property
    def sequences_per_step(self) -> int:
        """Token sequences per optimizer step, over all data ranks."""
        return self.rollout.prompts * self.rollout.group_size // self.batch.optimizer_steps

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is kept."""
        return self.loss.kl.coefficient > 0

    @property
    def compares_completions(self) -> bool:
        """Whether advantages compare rewards within a group, so that a group with equal rewards has no gradient."""
        return True

    @property
    def weights_alone(self) -> tuple[float, ...]:
        """Weights of rewards that are compared separately; empty if their sum is compared."""
        return ()

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether the KL divergence from the reference is subtracted from the reward."""
        return self.needs_reference and self.loss.kl.where == "reward"

    @property
    def reads_old_logprobs(self) -> bool:
        """Whether advantages need log-probabilities from before the optimizer step."""
        return self.has_kl_in_reward

    @property
    def is_on_policy(self) -> bool:
        """Whether the current log-probabilities are used as old ones, which are then not computed."""
        if self.loss.on_policy != "auto":
            return self.loss.on_policy
        read_elsewhere = self.reads_old_logprobs or self.router_replay.compare or self.loss_function is not None
        return self.batch.steps_of_all_epochs == 1 and not read_elsewhere

    @property
    def reward_names(self) -> list[str]:
        """Metric names of the rewards: their function names, numbered if a name is taken."""
        names: list[str] = []
        for reward in self.rewards:
            own = reward.function.rpartition(":")[2]
            numbered = (f"{own}_{number}" for number in itertools.count(2))
            names.append(next(n for n in itertools.chain([own], numbered) if n not in (*RESERVED_NAMES, *names)))
        return names

    @property
    def pass_criterion(self) -> tuple[int, float] | None:
        """Index in `rewards` and minimum score of the reward that decides whether a completion passes: the one with
        `passes_at`, else the first built-in one that compares with the answer, at its full score. None if there is
        neither."""
        own = next(((i, r.passes_at) for i, r in enumerate(self.rewards) if r.passes_at is not None), None)
        return own or next(((i, 1.0) for i, r in enumerate(self.rewards) if r.function in NEED_ANSWER), None)

    @model_validator(mode="after")
    def _learns_from_something(self) -> "OnlineConfig":
        if not self.rewards and self.compares_completions:
            raise ValueError("rewards: name at least one, such as math, or package.module:function")
        if self.filter.dynamic and not self.compares_completions:
            raise ValueError(
                "filter.dynamic drops groups with equal rewards, but completions are not compared in groups here: set "
                "it to false"
            )
        return self

    @model_validator(mode="after")
    def _one_reward_tells(self) -> "OnlineConfig":
        telling = [reward.function for reward in self.rewards if reward.passes_at is not None]
        if len(telling) > 1:
            raise ValueError(
                f"rewards: {' and '.join(telling)} have passes_at, but one reward decides whether a completion passes: "
                "set it for one"
            )
        return self

    @model_validator(mode="after")
    def _environment_rewards(self) -> "OnlineConfig":
        rollout = self.rollout
        is_asked = ENVIRONMENT in [reward.function for reward in self.rewards]
        if is_asked and rollout.environment is None and not rollout.has_agent:
            raise ValueError(
                "rewards.function=environment: no rollout.environment or rollout.agent returns rewards: set one, or "
                "use another reward"
            )
        if not is_asked and rollout.agent_failed != "leave_out":
            raise ValueError(
                f"rollout.agent_failed={rollout.agent_failed:g} is a reward from an agent, and rewards do not use it: "
                "add environment to rewards, or remove agent_failed"
            )
        return self

    @model_validator(mode="after")
    def _patience(self) -> "OnlineConfig":
        most = self.failures.hang_minutes
        for name, harness in (("lm_eval", self.validation.lm_eval), ("inspect", self.validation.inspect)):
            if harness is not None and most is not None and harness.quiet_minutes >= most:
                raise ValueError(
                    f"validation.{name}.quiet_minutes={harness.quiet_minutes:g} with failures.hang_minutes={most:g}: "
                    "the run would end first: lower the former, or raise the latter"
                )
        return self

    @model_validator(mode="after")
    def _sizes(self) -> "OnlineConfig":
        rollout, batch = self.rollout, self.batch
        if rollout.prompts % batch.optimizer_steps:
            raise ValueError(
                f"batch.optimizer_steps={batch.optimizer_steps} must divide rollout.prompts={rollout.prompts}: change "
                "one of them"
            )
        if self.compares_completions and rollout.group_size == 1:
            raise ValueError("rollout.group_size=1: completions are compared within their group: use at least 2")
        is_asked = self.loss.on_policy is True
        if is_asked and batch.steps_of_all_epochs > 1:
            key = "optimizer_steps" if batch.optimizer_steps > 1 else "epochs"
            raise ValueError(
                f"loss.on_policy=true with batch.{key}={getattr(batch, key)}: later optimizer steps are off-policy: "
                "set it to false, or use one optimizer step"
            )
        if is_asked and self.reads_old_logprobs:
            what = "loss.kl.where=reward" if self.has_kl_in_reward else "teachers"
            raise ValueError(
                f"{what} with loss.on_policy=true: the reward needs log-probabilities from before the "
                "optimizer step: set on_policy to false, or where to loss"
            )
        if self.router_replay.compare and is_asked:
            raise ValueError(
                "router_replay.compare=true with loss.on_policy=true: there are no old log-probabilities to compare: "
                "set one of them to false"
            )
        replay = self.router_replay
        if replay.enabled and "old_logprobs" not in replay.stages and not self.is_on_policy:
            raise ValueError(
                f"router_replay.stages={list(replay.stages)} lack old_logprobs, so ratios would compare different "
                "experts: add old_logprobs, or set loss.on_policy to true"
            )
        buffer = self.filter.overlong_buffer
        if buffer > rollout.max_new_tokens:
            raise ValueError(
                f"filter.overlong_buffer={buffer} with rollout.max_new_tokens={rollout.max_new_tokens}: the penalty "
                "rises over the last tokens before the limit, so the buffer must not be longer: lower it"
            )
        if rollout.max_staleness and self.loss.correction.kind == "none":
            raise ValueError(
                f"rollout.max_staleness={rollout.max_staleness} with loss.correction.kind=none: completions from older "
                "weights need a correction: use truncate, icepop, sequence_mask or a product of weights"
            )
        product = "rollout.prompts x rollout.group_size / batch.optimizer_steps"
        refuse_idle_data_ranks(product, self.sequences_per_step, self.parallel)
        return self


class GRPOConfig(OnlineConfig):
    """A reinforcement-learning run. `automodel-rl grpo --help` lists all keys.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "prompts.jsonl"}]}}
        >>> values |= {"rewards": [{"function": "math"}], "batch": {"microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> values |= {"rollout": {"prompts": 8, "group_size": 4, "max_prompt_tokens": 512, "max_new_tokens": 512}}
        >>> GRPOConfig(output="runs/mine", **values).advantage.kind
        'grpo'
    """

    algorithm: Literal["grpo"] = "grpo"
    """Reinforcement learning on prompts with rewards: GRPO and related methods; on-policy distillation with
    teachers."""

    advantage: AdvantageConfig = AdvantageConfig()

    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Teachers, by names of your choice, which score every token that the policy generates, with or without rewards.
    Each teaches the prompt sources that it lists."""

    distillation: OnPolicyDistillationConfig = OnPolicyDistillationConfig()

    @property
    def further_models(self) -> dict[str, FurtherModel]:
        """The teachers on the run's ranks, by name."""
        return local(self.teachers, self.model)

    @property
    def compares_completions(self) -> bool:
        """Whether rewards compared in groups are the only training signal."""
        return not self.teachers

    @property
    def weights_alone(self) -> tuple[float, ...]:
        """Weights of rewards that are compared separately; empty if their sum is compared."""
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
        """Sets the divergence's temperature to that of rollouts if it is not given."""
        loss, rollout = distillation.loss, info.data.get("rollout")
        if loss is None or rollout is None or "temperature" in loss.model_fields_set:
            return distillation
        return distillation.model_copy(update={"loss": loss.model_copy(update={"temperature": rollout.temperature})})

    @model_validator(mode="after")
    def _rewards_alone(self) -> "GRPOConfig":
        if self.advantage.kind == "gdpo":
            key = "filter.overlong_buffer" if self.filter.overlong_buffer else "loss.kl.where=reward"
            if self.filter.overlong_buffer or self.has_kl_in_reward:
                raise ValueError(
                    f"advantage.kind=gdpo compares each reward separately, and {key} is not a reward: remove it"
                )
            if len(self.rewards) < 2:
                raise ValueError(
                    "advantage.kind=gdpo compares several rewards separately: name at least two, or use grpo"
                )
        return self

    @model_validator(mode="after")
    def _teachers_are_asked(self) -> "GRPOConfig":
        if not self.teachers and self.distillation != OnPolicyDistillationConfig():
            raise ValueError("distillation: no teachers are set: name one in teachers, or remove distillation")
        divergence = self.distillation.loss
        check_can_compare(self.teachers, divergence, self.rollout.temperature)
        if divergence is not None and divergence.temperature != self.rollout.temperature:
            raise ValueError(
                f"distillation.loss.temperature={divergence.temperature:g} with "
                f"rollout.temperature={self.rollout.temperature:g}: one pass computes both at one temperature: set "
                "both to the same"
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


class PPOConfig(OnlineConfig):
    """A reinforcement-learning run with a critic. `automodel-rl ppo --help` lists all keys.

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
        """False: advantages come from the critic."""
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
