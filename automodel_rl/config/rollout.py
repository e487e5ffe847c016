"""How completions are generated and rewarded."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import BatchSize, Fraction, PathText, Positive, Section


class VllmConfig(Section):
    """vLLM, in a process of its own next to every rank, or as servers that are there."""

    python: PathText | None = None
    """Interpreter of an environment that has vLLM, whose pins clash with this package's; null is this one's own."""

    memory_fraction: Fraction = 0.4
    """Share of the device's memory for vLLM's weights and cache."""

    servers: tuple[str, ...] = ()
    """URLs of running servers, e.g. http://localhost:8000, on devices of their own. They are started with
    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs
    --weight-transfer-config '{"backend": "nccl"}'. Those of other machines need a token, --api-key, in VLLM_API_KEY."""

    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further arguments of vllm.LLM, such as max_num_seqs."""


class RolloutConfig(Section):
    prompts: BatchSize
    """Prompts of one step."""

    group_size: BatchSize = 8
    """Completions of each prompt."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by it, in sampling and in training alike. Sampling is from the whole vocabulary, for what
    top-p or top-k leave out would have no ratio to the policy that is trained."""

    validation_temperature: Annotated[float, Field(ge=0)] = 0.0
    """Of the completions of held-out prompts; 0 takes the likeliest token each time."""

    max_prompt_tokens: Positive = 1024
    """Longer prompts are left out, and counted."""

    max_new_tokens: Positive = 1024
    """Longest completion."""

    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the end-of-sequence token; they are part of it."""

    generator: Literal["transformers", "vllm"] = "transformers"
    """transformers: a whole copy of the model on every rank. vllm: vLLM, see `vllm`."""

    own_process: bool = False
    """The generator runs in a process of its own next to its rank, as vllm always does."""

    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Devices of their own for generators in processes, by number on the machine; none: each shares its rank's."""

    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Weight syncs that may come between the start of a step's rollouts and its training. Above 0 generators write the
    completions of later steps while earlier ones are trained on, and get new weights in the midst of it."""

    batch_size: Positive = 256
    """Completions that the transformers generator writes at once on each rank."""

    retries: Annotated[int, Field(ge=0)] = 2
    """How often a generator that fails is started anew, or servers are connected to again, within a step, before the
    run saves a checkpoint and ends."""

    warn_logprob_error: Annotated[float, Field(gt=1)] = 1.05
    """Warns of a step whose train/logprob_error is above: the generator and the trained model disagree."""

    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _placement(self) -> "RolloutConfig":
        has_process = self.own_process or self.generator == "vllm"
        if self.devices and not has_process:
            raise ValueError(f"devices={list(self.devices)} are for generators in processes: set own_process to true")
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices={list(self.devices)}: each generator needs a device of its own: name none twice")
        if self.devices and self.generator == "vllm" and self.vllm.servers:
            raise ValueError(f"devices={list(self.devices)}: servers have theirs already: leave devices out")
        if self.max_staleness and not has_process:
            raise ValueError(
                f"max_staleness={self.max_staleness}: a generator in this process cannot write while it trains: set "
                "own_process to true"
            )
        return self


NEED_ANSWER = ("exact_match", "last_number", "math")
"""Built-in rewards that compare with a record's answer."""

SCORES = {**dict.fromkeys((*NEED_ANSWER, "format"), (0.0, 1.0)), "length": (-math.inf, 0.0)}
"""Lowest and highest score of built-in rewards."""


class RewardConfig(Section):
    function: str
    """Built in: exact_match, last_number, math, format, length; or an import path `package.module:function`, called as
    function(completion: str, example: dict) -> float."""

    weight: float = 1.0
    """The reward of a completion is the weighted sum of all."""

    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further keyword arguments, such as pattern for format."""

    time_limit: Annotated[float, Field(gt=0)] = 10.0
    """Seconds for one call."""

    on_error: float = 0.0
    """Score where the call raises, runs out of time or gives no finite number; such calls are counted."""

    passes_at: float | None = None
    """Score from which on a completion passes, for val/pass@1; of one reward at most. Where no reward has it, the first
    built-in that compares with the answer tells, at its full score, 1; where there is none, there is no val/pass@1."""

    @model_validator(mode="after")
    def _can_tell(self) -> "RewardConfig":
        lowest, highest = SCORES.get(self.function, (-math.inf, math.inf))
        if self.passes_at is not None and not lowest < self.passes_at <= highest:
            raise ValueError(
                f"passes_at={self.passes_at:g} of {self.function}: its scores go from {lowest:g} to {highest:g}, so "
                "either all completions would pass or none: give a score between, or leave it out"
            )
        return self


class FilterConfig(Section):
    """Which completions are learned from, and how rewards are shaped."""

    dynamic: bool = False
    """Leave out groups whose rewards are all the same, and generate for further prompts in their place (DAPO,
    arXiv:2503.14476)."""

    max_refills: Annotated[int, Field(ge=0)] = 3
    """Further generations of a step at most; then it learns from the groups it has."""

    mask_overlong: bool = False
    """Completions cut off at rollout.max_new_tokens count nothing in the loss."""

    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Tokens before the limit over which a penalty rises from 0 to `overlong_penalty` (DAPO's soft punishment)."""

    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Taken off the reward of a completion at the limit, with an `overlong_buffer`."""

    reward_scale: Annotated[float, Field(gt=0)] = 1.0
    """Rewards are multiplied by it before anything else."""
