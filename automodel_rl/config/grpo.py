"""The whole config of a reinforcement-learning run."""

import itertools
from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.data import PolicyBatchConfig, PromptDataConfig
from automodel_rl.config.losses import AdvantageConfig, PolicyLossConfig
from automodel_rl.config.rollout import (
    ENVIRONMENT,
    NEED_ANSWER,
    FilterConfig,
    RewardConfig,
    RolloutConfig,
    RouterReplayConfig,
    Transport,
    WeightSyncConfig,
)
from automodel_rl.config.run import RunConfig, refuse_idle_data_ranks

TAKEN_NAMES = ("mean", "std", "errors")
"""Names of metrics about all rewards together. No reward may have one of these names."""


class GRPOConfig(RunConfig):
    """A run of reinforcement learning. `automodel-rl grpo --help` lists every key.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "prompts.jsonl"}]}}
        >>> values |= {"rewards": [{"function": "math"}], "batch": {"microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> values |= {"rollout": {"prompts": 8, "group_size": 4, "max_prompt_tokens": 512, "max_new_tokens": 512}}
        >>> GRPOConfig(output="runs/mine", **values).advantage.kind
        'grpo'
    """

    algorithm: Literal["grpo"] = "grpo"
    """Reinforcement learning on prompts with rewards: GRPO and its relatives."""

    data: PromptDataConfig
    batch: PolicyBatchConfig = PolicyBatchConfig()
    rollout: RolloutConfig
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)]
    """Functions whose weighted sum is a completion's reward."""

    filter: FilterConfig = FilterConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: PolicyLossConfig = PolicyLossConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()

    @property
    def sequences_per_step(self) -> int:
        """Token sequences of one optimizer step, over all data ranks."""
        return self.rollout.prompts * self.rollout.group_size // self.batch.optimizer_steps

    @property
    def transport(self) -> Transport:
        """How weights reach the generators."""
        return self._transports[0] if self.weight_sync.transport == "auto" else self.weight_sync.transport

    @property
    def _transports(self) -> tuple[Transport, ...]:
        """The transports that fit the place of the generators, the best first."""
        if self.rollout.generator == "vllm":
            return ("vllm",)
        if not self.rollout.own_process:
            return ("local",)
        return ("collective",) if self.rollout.devices else ("ipc", "collective")

    @property
    def sleep_level(self) -> int:
        """The level at which generators sleep between rollouts; 0 if they stay awake."""
        sleep = self.rollout.vllm.sleep
        if self.rollout.generator != "vllm" or sleep == "none":
            return 0
        return (1 if self.weight_sync.adapters == "alone" else 2) if sleep == "auto" else sleep

    @property
    def shares_memory(self) -> bool:
        """Whether generators and the trainer have device memory in turns."""
        return bool(self.sleep_level or self.memory.offload)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is kept."""
        return self.loss.kl.coefficient > 0

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with its completion, or with its conversation."""
        return self.rollout.max_prompt_tokens + self.rollout.completion_tokens

    @property
    def longest_keys(self) -> str:
        """The keys that add up to the longest sequence, for error messages."""
        rollout = self.rollout
        if not rollout.has_turns:
            return "rollout.max_prompt_tokens + rollout.max_new_tokens"
        if rollout.max_tokens is not None:
            return "rollout.max_prompt_tokens + rollout.max_tokens"
        return "rollout.max_prompt_tokens + rollout.max_turns x rollout.max_new_tokens"

    @property
    def is_on_policy(self) -> bool:
        """Whether the current log-probabilities are taken for old ones, which are then not computed."""
        if self.loss.on_policy != "auto":
            return self.loss.on_policy
        in_reward = self.needs_reference and self.loss.kl.where == "reward"
        read_elsewhere = in_reward or self.router_replay.compare or self.loss_function is not None
        return self.batch.steps_of_all_epochs == 1 and not read_elsewhere

    @property
    def reward_names(self) -> list[str]:
        """Names of the rewards in metrics: the names of their functions, with a number where a name is taken."""
        names: list[str] = []
        for reward in self.rewards:
            own = reward.function.rpartition(":")[2]
            numbered = (f"{own}_{number}" for number in itertools.count(2))
            names.append(next(n for n in itertools.chain([own], numbered) if n not in (*TAKEN_NAMES, *names)))
        return names

    @property
    def passing(self) -> tuple[int, float] | None:
        """The reward that decides whether a completion passes, by its place in `rewards`, and the lowest score that
        passes. It is the reward with `passes_at`, else the first built-in one that compares with the answer, at its
        full score; None if there is neither."""
        own = next(((i, r.passes_at) for i, r in enumerate(self.rewards) if r.passes_at is not None), None)
        return own or next(((i, 1.0) for i, r in enumerate(self.rewards) if r.function in NEED_ANSWER), None)

    @model_validator(mode="after")
    def _one_reward_tells(self) -> "GRPOConfig":
        telling = [reward.function for reward in self.rewards if reward.passes_at is not None]
        if len(telling) > 1:
            raise ValueError(
                f"rewards: {' and '.join(telling)} have passes_at, and one reward tells whether a completion passes: "
                "give it to one"
            )
        return self

    @model_validator(mode="after")
    def _environment_rewards(self) -> "GRPOConfig":
        if self.rollout.environment is None and ENVIRONMENT in [reward.function for reward in self.rewards]:
            raise ValueError(
                "rewards.function=environment: there is no rollout.environment that gives rewards: name one, or use "
                "another reward"
            )
        return self

    @model_validator(mode="after")
    def _sizes(self) -> "GRPOConfig":
        rollout, batch = self.rollout, self.batch
        longest = self.longest_sequence
        if batch.microbatch_tokens != "auto" and batch.microbatch_tokens < longest:
            raise ValueError(
                f"batch.microbatch_tokens={batch.microbatch_tokens} must hold the longest prompt and completion, "
                f"{self.longest_keys} = {longest}: raise it, or lower one of these"
            )
        if rollout.prompts % batch.optimizer_steps:
            raise ValueError(
                f"batch.optimizer_steps={batch.optimizer_steps} must divide rollout.prompts={rollout.prompts}: change "
                "one of them"
            )
        if rollout.group_size == 1:
            raise ValueError("rollout.group_size=1: completions are compared within their group: use at least 2")
        is_asked = self.loss.on_policy is True
        if is_asked and batch.steps_of_all_epochs > 1:
            key = "optimizer_steps" if batch.optimizer_steps > 1 else "epochs"
            raise ValueError(
                f"loss.on_policy=true with batch.{key}={getattr(batch, key)}: later optimizer steps are off-policy: "
                "set it to false, or use one optimizer step"
            )
        if is_asked and self.loss.kl.coefficient and self.loss.kl.where == "reward":
            raise ValueError(
                "loss.kl.where=reward with loss.on_policy=true: the reward needs log-probabilities from before the "
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
                f"router_replay.stages={list(replay.stages)} leave out old_logprobs, and ratios would compare "
                "different experts: add old_logprobs, or set loss.on_policy to true"
            )
        self._check_sync()
        self._check_sharing()
        product = "rollout.prompts x rollout.group_size / batch.optimizer_steps"
        refuse_idle_data_ranks(product, self.sequences_per_step, self.parallel)
        return self

    def _check_sync(self) -> None:
        sync, rollout = self.weight_sync, self.rollout
        if self.transport not in self._transports:
            raise ValueError(
                f"weight_sync.transport={sync.transport}: with this rollout.generator, own_process and devices it can "
                f"be {' or '.join(self._transports)}: use auto"
            )
        if rollout.max_staleness and self.loss.correction.kind == "none":
            raise ValueError(
                f"rollout.max_staleness={rollout.max_staleness} with loss.correction.kind=none: completions of older "
                "weights need a correction: use truncate, icepop or sequence_mask"
            )
        if sync.checksum and rollout.generator == "vllm":
            raise ValueError(
                "weight_sync.checksum=true: vllm keeps weights in other shapes than checkpoints, so they cannot be "
                "compared: set it to false"
            )

    def _check_sharing(self) -> None:
        """Refuses to share devices between training and rollouts that are not one after the other, or not there."""
        rollout = self.rollout
        own = "vllm.servers have memory" if rollout.vllm.servers else "devices are" if rollout.devices else ""
        if self.shares_memory and own:
            what = f"rollout.vllm.sleep={rollout.vllm.sleep}" if self.sleep_level else "memory.offload"
            raise ValueError(
                f"{what}: rollout.{own} apart from the trainer's, and neither could use the other's: leave it out"
            )
        for key, idle in (("sleep", "none"), ("tensor_parallel", 1)):
            value = getattr(rollout.vllm, key)
            if rollout.generator != "vllm" and value != idle:
                raise ValueError(
                    f"rollout.vllm.{key}={value} with rollout.generator={rollout.generator}: only vLLM does so: set it "
                    f"to {idle}, or generator to vllm"
                )
        if self.sleep_level == 2 and self.weight_sync.adapters == "alone":
            raise ValueError(
                "rollout.vllm.sleep=2 with weight_sync.adapters=alone: the weights that vLLM drops are not sent again: "
                "use 1 or auto"
            )
        size = rollout.vllm.tensor_parallel
        if size > 1 and rollout.vllm.servers:
            raise ValueError(
                f"rollout.vllm.tensor_parallel={size}: rollout.vllm.servers run already: leave it out, and start them "
                f"with --tensor-parallel-size {size}"
            )
        if rollout.generator == "vllm" and len(rollout.devices) % size:
            raise ValueError(
                f"rollout.devices={list(rollout.devices)} are not whole groups of rollout.vllm.tensor_parallel={size}: "
                "list a multiple of it"
            )
        if size > 1 and not rollout.devices and self.parallel.world_size % size:
            raise ValueError(
                f"rollout.vllm.tensor_parallel={size} does not divide the {self.parallel.world_size} ranks: use a "
                "divisor"
            )
        key = "rollout.vllm.sleep" if self.sleep_level else "memory.offload"
        if rollout.max_staleness and self.shares_memory:
            raise ValueError(
                f"{key} with rollout.max_staleness={rollout.max_staleness}: generators write while the model trains, "
                "so neither can lend its memory: leave one of them out"
            )
