"""How completions are generated and rewarded, and how weights are synced to the generators."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import BatchSize, Positive, Section
from automodel_rl.config.episodes import EpisodeConfig
from automodel_rl.config.generators import GeneratorConfig, TransformersGeneratorConfig
from automodel_rl.generator_messages import Sampling

ReplayStage = Literal["old_logprobs", "ref_logprobs", "train"]


class RolloutConfig(EpisodeConfig):
    prompts: BatchSize
    """Number of prompts per step."""

    group_size: BatchSize = 8
    """Number of completions per prompt, which form a group."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature that divides the logits, in sampling and in training. Training samples are drawn without top-p or
    top-k, since the ratio to the trained policy would be undefined for excluded tokens."""

    validation_temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature for held-out prompts; 0 is greedy."""

    validation_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """top-p for held-out prompts (nucleus sampling; Holtzman et al., arXiv:1904.09751); 1 is off. Training samples use
    the whole vocabulary."""

    validation_top_k: Annotated[int, Field(ge=0)] = 0
    """top-k for held-out prompts; 0 is off."""

    validation_samples: Annotated[int, Field(gt=0, le=1024)] = 1
    """Number of completions per held-out prompt. Above 1, metrics are val/mean@k, the fraction of completions that
    pass; val/pass@k, the fraction of prompts with at least one that passes; and val/maj@k, the fraction of prompts
    whose most frequent answer passes. Built-in rewards report the answer; a custom reward returns it as the text
    `answer` among its metrics."""

    max_prompt_tokens: Positive = 1024
    """Maximum tokens of a prompt. Longer prompts are skipped and counted in the metrics."""

    max_new_tokens: Positive = 1024
    """Maximum tokens of a completion, or of each turn of a conversation."""

    stop: tuple[str, ...] = ()
    """Stop strings, in addition to the model's end tokens. The completion includes the stop string."""

    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Stop tokens, in addition to those of config.json, generation_config.json, the tokenizer and the chat template.
    The completion includes the stop token."""

    generator: GeneratorConfig = TransformersGeneratorConfig()
    """The generator: transformers (a full copy of the model for every rank), vllm, servers (running vLLM servers) or
    joined (generators that join the run). Either its name, or a section with its name as `kind` and the keys of this
    kind."""

    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Maximum age of a completion in policy versions when it is trained on. Above 0, generators produce completions for
    later steps during training, and receive new weights in the middle of completions."""

    retries: Annotated[int, Field(ge=0)] = 2
    """Maximum restarts of a failed generator, or reconnections to its servers, per step. Then the run saves a
    checkpoint and ends."""

    warn_logprob_error: Annotated[float, Field(gt=1)] = 1.05
    """Value of train/logprob_error above which a step warns that generator and trained model disagree."""

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters of training completions."""
        return Sampling(self.max_new_tokens, self.temperature, stop=self.stop)

    @property
    def validation_sampling(self) -> Sampling:
        """Sampling parameters of validation completions."""
        return Sampling(
            self.max_new_tokens,
            self.validation_temperature,
            self.validation_top_p,
            self.validation_top_k,
            self.stop,
        )

    @property
    def completion_tokens(self) -> int:
        """Maximum tokens after a prompt."""
        if not self.has_turns:
            return self.max_new_tokens
        return self.max_tokens or self.max_turns * self.max_new_tokens

    @property
    def sampled_tokens(self) -> int:
        """Maximum tokens after a prompt that the model itself generates."""
        most = self.max_turns * self.max_new_tokens if self.has_turns else self.max_new_tokens
        return min(most, self.completion_tokens)

    @model_validator(mode="after")
    def _placement(self) -> "RolloutConfig":
        if self.completion_tokens < self.max_new_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} is too small for a turn of max_new_tokens={self.max_new_tokens}: raise "
                "it, or lower max_new_tokens"
            )
        if self.generator.kind == "vllm" and self.generator.drafts and self.temperature != 1:
            raise ValueError(
                f"temperature={self.temperature} with generator.drafts={self.generator.drafts}: vLLM returns "
                "log-probabilities of drafted tokens at temperature 1 only: use temperature=1, or no drafts"
            )
        if self.validation_samples > 1 and not self.validation_temperature:
            raise ValueError(
                f"validation_samples={self.validation_samples} with validation_temperature=0: all completions of a "
                "prompt would be the same: raise the temperature"
            )
        if (self.validation_top_p < 1 or self.validation_top_k) and not self.validation_temperature:
            key = "validation_top_p" if self.validation_top_p < 1 else "validation_top_k"
            raise ValueError(
                f"{key}={getattr(self, key)} with validation_temperature=0, which takes the most likely token: raise "
                "the temperature, or remove it"
            )
        if self.max_staleness and not self.generator.has_process:
            raise ValueError(
                f"max_staleness={self.max_staleness}: a generator in this process cannot generate while it trains: set "
                "generator to {kind: transformers, place: shared}, or to another kind"
            )
        return self


NEED_ANSWER = ("exact_match", "last_number", "math")
"""Built-in rewards that compare a completion with the record's answer."""

ENVIRONMENT = "environment"
"""Name of the built-in reward that an environment or agent returns."""

SCORES = {**dict.fromkeys((*NEED_ANSWER, "format"), (0.0, 1.0)), "length": (-math.inf, 0.0)}
"""Lowest and highest score of built-in rewards."""


MODEL_SECONDS = 600.0
"""Default time limit of a reward model for all completions of a step, in seconds."""


class RewardConfig(Section):
    function: str
    """A built-in reward or the import path `package.module:function` of a custom one. Built-in: exact_match,
    last_number, math, format, length; reward_model, a trained model in a separate process (options path, device and
    dtype; short form {model: PATH}); served_reward_model, one served by vLLM (options url, name and path); environment,
    the sum of an environment's rewards, or the reward that an agent returns. In multi-turn conversations all others get
    the last turn, and the whole conversation as example["messages"]. A custom function is called as
    function(completion: str, example: dict) -> float, and may also return a number and a dict of metrics. Calls of an
    async function run concurrently. A function whose first parameter is named completions gets lists and returns a
    list."""

    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Weight of this reward. A completion's reward is the weighted sum of all."""

    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Additional keyword arguments of the function, e.g. pattern for format."""

    workers: Annotated[int, Field(gt=0, le=1024)] = 1
    """Number of processes per rank that call the function in parallel. They run on the machine of the first rank; their
    total is capped at its number of processors, but never below this number."""

    concurrency: Annotated[int, Field(gt=0, le=100_000)] = 64
    """Maximum concurrent calls of an async function in each process."""

    time_limit: Annotated[float, Field(gt=0)] = 10.0
    """Time limit of a call in seconds."""

    on_error: Literal["auto", "leave_out"] | Annotated[float, Field(allow_inf_nan=False)] = "auto"
    """Score if the call raises, times out or returns a non-finite number. The metrics count such calls. leave_out: no
    score; the completion is not trained, and its group is compared without it. auto: 0 if the completion caused the
    error: a non-finite result, or ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError,
    TypeError or ValueError in a function that is not async; leave_out for all other errors, such as timeouts, lost
    processes, and failures of files, connections or judges."""

    passes_at: float | None = None
    """Minimum score of a completion that passes, for the metric val/pass@1. At most one reward may set it. By default,
    a completion passes with the full score, 1, of the first built-in reward that compares with the answer; without such
    a reward, there is no val/pass@1."""

    @model_validator(mode="before")
    @classmethod
    def _function_alone(cls, values: Any) -> Any:
        if isinstance(values, dict) and "model" in values:
            given = {key: value for key, value in values.items() if key != "model"}
            options = {**(given.get("options") or {}), "path": values["model"]}
            values = {"function": "reward_model", **given, "options": options}
        if isinstance(values, dict) and values.get("function") == "reward_model":
            return {"time_limit": MODEL_SECONDS, **values}
        return {"function": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _can_tell(self) -> "RewardConfig":
        lowest, highest = SCORES.get(self.function, (-math.inf, math.inf))
        if self.passes_at is not None and not lowest < self.passes_at <= highest:
            raise ValueError(
                f"passes_at={self.passes_at:g} of {self.function}: its scores range from {lowest:g} to {highest:g}, so "
                "all completions or none would pass: set a score in between, or remove it"
            )
        return self


class FilterConfig(Section):
    """Selection of completions to train on, and adjustments of their rewards."""

    dynamic: bool = False
    """Drop groups whose rewards are all equal, and generate completions for more prompts in their place (DAPO,
    arXiv:2503.14476). The penalty of overlong_buffer is ignored in this comparison."""

    max_refills: Annotated[int, Field(ge=0)] = 3
    """Maximum rounds of additional completions per step with `dynamic`. Then the step trains on the groups it has."""

    mask_overlong: bool = False
    """Exclude completions that were cut off at rollout.max_new_tokens from the loss, its normalisation, and the
    comparison within their group. A group with fewer than two others is not trained."""

    masked_count: bool = False
    """Include completions masked by mask_overlong in the mean and deviation of their group, in the test of whether its
    rewards differ, and in the number of completions that loss.normalise=sequence and constant divide by."""

    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Number of tokens before rollout.max_new_tokens over which a penalty rises from 0 to `overlong_penalty` (DAPO's
    soft punishment); 0 is off."""

    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Penalty of a completion of rollout.max_new_tokens tokens, subtracted from its reward. Requires an
    `overlong_buffer`."""

    reward_scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor on all rewards, applied before anything else."""

    @model_validator(mode="after")
    def _masks_something(self) -> "FilterConfig":
        if self.masked_count and not self.mask_overlong:
            raise ValueError(
                "masked_count=true without mask_overlong=true: nothing is masked: set mask_overlong, or remove "
                "masked_count"
            )
        return self


LARGEST_BUFFER = 2**28
"""Maximum size in bytes that `auto` chooses for a weight-sync buffer."""


class WeightSyncConfig(Section):
    buffer_mib: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """Size of a buffer in MiB. Buffers stay allocated between weight syncs. A tensor larger than a buffer is sent in
    parts, except to vllm, where buffers are enlarged to the largest tensor. auto: 256, or less if all buffers would
    take more than a twentieth of the GPU memory that is free at the start."""

    num_buffers: Positive = 4
    """Number of buffers, each with its own stream: one is filled while another is sent."""

    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    """Precision of synced weights and of the generator; null: model.dtype. Shards are cast before they are gathered."""

    adapters: Literal["merged", "alone"] = "merged"
    """What is sent with model.lora. merged: full weights, with the adapters added in float32. alone: only the adapters,
    which the generator applies like the trainer."""

    publish: Path | None = None
    """Folder shared by all ranks to which each version of the weights is also written, as the difference from the
    previous version; null: none. Any version can be read from it bit for bit (weight_sync/README.md). The first rank of
    a stage keeps a copy of the stage's latest version in host memory."""

    signing_key: Path | None = None
    """File of an Ed25519 private key in PEM with which the first rank signs published weights; null: unsigned. `openssl
    genpkey -algorithm ed25519` creates one."""

    checksum: bool = False
    """Compare every tensor of the generator with what the trainer sent, after every weight sync."""

    check_every: Annotated[int, Field(ge=0)] = 50
    """Interval in steps of a check that generators hold the trained weights: each continues fixed texts, and the run
    stops if its log-probabilities differ from the model's by more than rounding explains. Also runs at the start, with
    perturbed weights. In a deep bf16 model, rounding may hide wrong weights; the run then reports so. 0 is off."""

    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Maximum seconds that trainer and generator wait for each other at any point of a weight sync. Then the generator
    is restarted; servers are only reconnected to."""

    @model_validator(mode="after")
    def _publishes_whole_weights(self) -> "WeightSyncConfig":
        if self.publish is not None and self.adapters == "alone":
            raise ValueError(
                f"publish={self.publish} writes the weights of a whole model, but adapters=alone has none: set "
                "adapters to merged, or remove publish"
            )
        if self.signing_key is not None and self.publish is None:
            raise ValueError(f"signing_key={self.signing_key} signs published weights: set publish, or remove it")
        return self


class RouterReplayConfig(Section):
    """Router replay (R3, arXiv:2510.11370)."""

    enabled: bool = False
    """Route tokens to the experts that the generator chose for them. The weights of these experts still come from the
    trained router."""

    stages: tuple[ReplayStage, ...] = ("old_logprobs", "train")
    """Passes with replay. old_logprobs: the policy's log-probabilities before the optimizer steps. ref_logprobs: the
    reference's log-probabilities. train: forward and backward of the optimizer steps."""

    on_missing: Literal["live", "error"] = "error"
    """Handling of tokens whose experts the generator did not report. live: the router chooses. error: the completion
    counts as failed and is removed from its group."""

    compare: bool = False
    """Diagnostic: run an additional pass without replay in each step, which gives the metric train/logprob_error_live,
    to compare with train/logprob_error."""

    @model_validator(mode="after")
    def _train(self) -> "RouterReplayConfig":
        if self.enabled and "train" not in self.stages:
            raise ValueError(
                f"stages={list(self.stages)} lack train, so gradients would use other experts than the rollouts: add "
                "train, or set enabled to false"
            )
        if self.compare and not self.enabled:
            raise ValueError(
                "compare=true has nothing to compare without enabled=true: set enabled to true, or compare to false"
            )
        return self
