"""How completions are generated and rewarded, and how weights reach the generators."""

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
    """Number of prompts of one step."""

    group_size: BatchSize = 8
    """Number of completions of each prompt: its group."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature that divides the logits, both in sampling and in training. Tokens are sampled from the whole
    vocabulary: with top-p or top-k, the ratio to the trained policy would be undefined for the tokens left out."""

    validation_temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature of completions for held-out prompts; 0 always takes the likeliest token."""

    validation_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of probability from which completions for held-out prompts are sampled, the likeliest tokens first (nucleus
    sampling; Holtzman et al., arXiv:1904.09751). Completions that are trained on are sampled from all tokens."""

    validation_top_k: Annotated[int, Field(ge=0)] = 0
    """Number of likeliest tokens from which completions for held-out prompts are sampled; 0 for all."""

    validation_samples: Annotated[int, Field(gt=0, le=1024)] = 1
    """Number of completions of each held-out prompt. With k above 1, metrics are val/mean@k, the share of completions
    that pass; val/pass@k, the share of prompts of which one passes; and val/maj@k, the share of prompts whose most
    frequent answer passes. Built-in rewards tell answers; your own tells one as the text `answer` among its metrics."""

    max_prompt_tokens: Positive = 1024
    """Most tokens of a prompt. Longer prompts are left out; the metrics count them."""

    max_new_tokens: Positive = 1024
    """Most tokens of a completion, or of each turn of a conversation."""

    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the model's own end tokens. The completion includes the text that ended
    it."""

    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end a completion, besides those of config.json, generation_config.json, the tokenizer and the chat
    template. The completion includes the token that ended it."""

    generator: GeneratorConfig = TransformersGeneratorConfig()
    """What writes completions: transformers (a whole copy of the model for every rank), vllm, or servers of vLLM that
    run already. Its name alone, or a section with its name as `kind` and the keys of this kind."""

    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Largest age of a completion when it is trained on, in policy versions. Above 0, generators write the completions
    of later steps while earlier steps are trained on, and get new weights while they write."""

    retries: Annotated[int, Field(ge=0)] = 2
    """How often within a step a failed generator is started again, or its servers are connected to again. After that,
    the run saves a checkpoint and ends."""

    warn_logprob_error: Annotated[float, Field(gt=1)] = 1.05
    """Value of train/logprob_error above which a step prints a warning: the generator and the trained model
    disagree."""

    @property
    def sampling(self) -> Sampling:
        """How completions that are trained on are sampled."""
        return Sampling(self.max_new_tokens, self.temperature, stop=self.stop)

    @property
    def validation_sampling(self) -> Sampling:
        """How completions for held-out prompts are sampled."""
        return Sampling(
            self.max_new_tokens,
            self.validation_temperature,
            self.validation_top_p,
            self.validation_top_k,
            self.stop,
        )

    @property
    def completion_tokens(self) -> int:
        """Most tokens after a prompt."""
        if not self.has_turns:
            return self.max_new_tokens
        return self.max_tokens or self.max_turns * self.max_new_tokens

    @property
    def sampled_tokens(self) -> int:
        """Most tokens after a prompt that the model itself writes."""
        most = self.max_turns * self.max_new_tokens if self.has_turns else self.max_new_tokens
        return min(most, self.completion_tokens)

    @model_validator(mode="after")
    def _placement(self) -> "RolloutConfig":
        if self.completion_tokens < self.max_new_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} holds no turn of max_new_tokens={self.max_new_tokens}: raise it, or "
                "lower max_new_tokens"
            )
        if self.generator.kind == "vllm" and self.generator.drafts and self.temperature != 1:
            raise ValueError(
                f"temperature={self.temperature} with generator.drafts={self.generator.drafts}: vLLM tells "
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
                f"{key}={getattr(self, key)} with validation_temperature=0, which takes the likeliest token: raise the "
                "temperature, or leave it out"
            )
        if self.max_staleness and not self.generator.has_process:
            raise ValueError(
                f"max_staleness={self.max_staleness}: a generator in this process cannot write while it trains: set "
                "generator to {kind: transformers, place: shared}, or to another kind"
            )
        return self


NEED_ANSWER = ("exact_match", "last_number", "math")
"""Built-in rewards that compare a completion with the record's answer."""

ENVIRONMENT = "environment"
"""The built-in reward that an environment or an agent gives."""

SCORES = {**dict.fromkeys((*NEED_ANSWER, "format"), (0.0, 1.0)), "length": (-math.inf, 0.0)}
"""Lowest and highest score of built-in rewards."""


MODEL_SECONDS = 600.0
"""Most seconds that a reward model may take for all completions of a step, unless a config says otherwise."""


class RewardConfig(Section):
    function: str
    """A built-in reward: exact_match, last_number, math, format, length; reward_model, a trained one in a process of
    its own (options path, device and dtype), for which {model: PATH} is short; served_reward_model, one behind vLLM
    (options url, name and path); or environment, which is the sum of an environment's rewards, or the reward that an
    agent returns. In conversations of several turns the others get the last turn, and the whole conversation as
    example["messages"]. Or the import path `package.module:function` of your own, called as function(completion: str,
    example: dict) -> float. An async function has many calls at once. A function whose first parameter is called
    completions gets lists, and returns a list. In place of a number it may return a number and a dict of metrics."""

    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Weight of this reward. A completion's reward is the weighted sum of all."""

    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further keyword arguments of the function, e.g. pattern for format."""

    workers: Annotated[int, Field(gt=0, le=1024)] = 1
    """Number of processes for each rank that call the function at the same time. They run on the machine of the first
    rank, and are no more than it has processors, unless this number alone is."""

    concurrency: Annotated[int, Field(gt=0, le=100_000)] = 64
    """Most calls of an async function at once in each process."""

    time_limit: Annotated[float, Field(gt=0)] = 10.0
    """Most seconds that one call may take."""

    on_error: Literal["auto", "leave_out"] | Annotated[float, Field(allow_inf_nan=False)] = "auto"
    """Score if the call raises, takes too long or returns no finite number. The metrics count such calls. leave_out: no
    score; the completion leaves its group, is not trained, and the others are compared without it. auto: leave_out if
    the error tells nothing of the completion: the call took too long, its process ended, a file, a connection or a
    judge failed, which is every error of an async function and all but these of others: ArithmeticError,
    AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError. These, and a result that is no
    finite number, come from what the completion is, and score 0."""

    passes_at: float | None = None
    """Lowest score with which a completion passes, for the metric val/pass@1. At most one reward has it. If none has, a
    completion passes with the full score, 1, of the first built-in reward that compares with the answer. If there is no
    such reward either, there is no val/pass@1."""

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
                f"passes_at={self.passes_at:g} of {self.function}: its scores go from {lowest:g} to {highest:g}, so "
                "either all completions would pass or none: give a score between, or leave it out"
            )
        return self


class FilterConfig(Section):
    """Selection of the completions to learn from, and changes to their rewards."""

    dynamic: bool = False
    """Leave out groups whose rewards are all equal, and generate completions for further prompts in their place (DAPO,
    arXiv:2503.14476). The penalty of overlong_buffer makes no difference."""

    max_refills: Annotated[int, Field(ge=0)] = 3
    """How often a step may generate further completions with `dynamic`. After that it trains on the groups it has."""

    mask_overlong: bool = False
    """Leave completions that were cut off at rollout.max_new_tokens out of the loss and of what divides it, and compare
    the others of their group without them. A group with fewer than two others teaches nothing."""

    masked_count: bool = False
    """Count completions that mask_overlong masks in their group's mean and deviation, in whether its rewards differ,
    and in the number of completions that loss.normalise=sequence and constant divide by."""

    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Number of tokens before rollout.max_new_tokens, and at most as many, over which a penalty rises from 0 to
    `overlong_penalty` (DAPO's soft punishment)."""

    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Penalty of a completion of rollout.max_new_tokens, subtracted from its reward. It needs an `overlong_buffer`."""

    reward_scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor of all rewards, applied before anything else."""

    @model_validator(mode="after")
    def _masks_something(self) -> "FilterConfig":
        if self.masked_count and not self.mask_overlong:
            raise ValueError("masked_count=true without mask_overlong=true: nothing is masked: set it, or leave it out")
        return self


LARGEST_BUFFER = 2**28
"""Largest size in bytes of a buffer for weight syncs that `auto` chooses."""


class WeightSyncConfig(Section):
    buffer_mib: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """Size of a buffer in MiB. Buffers stay allocated between weight syncs. A larger tensor is sent in several buffers;
    for vllm, the buffers are made as large as the largest tensor. auto: 256, or less where a GPU has so little memory
    left at the start that all buffers would take more than a twentieth of it."""

    num_buffers: Positive = 4
    """Number of buffers, which are used in turn, each on a stream of its own: one is filled while another is being
    sent."""

    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    """Precision in which weights are sent and the generator computes; null takes model.dtype. Shards are cast before
    they are gathered."""

    adapters: Literal["merged", "alone"] = "merged"
    """What is sent with model.lora. merged: whole weights, to which the adapters are added in float32. alone: only the
    adapters, which the generator applies as the trainer does."""

    publish: Path | None = None
    """Folder that each version of the weights is written to, too, as what has changed since the version before; null
    writes none. Whoever shares the folder reads any version from it, bit for bit (weight_sync/README.md). All ranks
    share it. The first rank of a stage keeps the stage's last version in host memory."""

    signing_key: Path | None = None
    """File of an Ed25519 private key in PEM, with which the first rank signs what is published; null signs nothing.
    `openssl genpkey -algorithm ed25519` makes one."""

    checksum: bool = False
    """Compare every tensor of the generator with what the trainer sent, after every weight sync."""

    check_every: Annotated[int, Field(ge=0)] = 50
    """Let every generator write a fixed text at the start of a run, with changed weights, and in every so many steps;
    the run stops if log-probabilities of its tokens are not what the model computes, by more than rounding explains.
    Of a deep model in bf16, rounding may explain as much as other weights make; the run says so then. 0 never does."""

    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Most seconds that the trainer or a generator waits for the other at any point of a weight sync. After that the
    generator is started again; servers are only connected to again."""

    @model_validator(mode="after")
    def _publishes_whole_weights(self) -> "WeightSyncConfig":
        if self.publish is not None and self.adapters == "alone":
            raise ValueError(
                f"publish={self.publish} writes the weights of a whole model, and adapters=alone makes none: set "
                "adapters to merged, or leave publish out"
            )
        if self.signing_key is not None and self.publish is None:
            raise ValueError(f"signing_key={self.signing_key} signs what is published: set publish, or leave it out")
        return self


class RouterReplayConfig(Section):
    """Router replay (R3, arXiv:2510.11370)."""

    enabled: bool = False
    """Send tokens to the experts that the generator chose for them. The weights of these experts still come from the
    trained router."""

    stages: tuple[ReplayStage, ...] = ("old_logprobs", "train")
    """Passes with replay. old_logprobs: the policy's log-probabilities before the optimizer steps. ref_logprobs: the
    reference's log-probabilities. train: forward and backward of the optimizer steps."""

    on_missing: Literal["live", "error"] = "error"
    """What happens if the generator does not report a token's experts. live: the router chooses. error: the completion
    counts as failed, and leaves its group."""

    compare: bool = False
    """Diagnosis: run one more pass without replay in each step, for the metric train/logprob_error_live, to compare
    with train/logprob_error."""

    @model_validator(mode="after")
    def _train(self) -> "RouterReplayConfig":
        if self.enabled and "train" not in self.stages:
            raise ValueError(
                f"stages={list(self.stages)} leave out train, and gradients would be those of other experts than the "
                "rollouts': add train, or set enabled to false"
            )
        if self.compare and not self.enabled:
            raise ValueError("compare=true has nothing to compare without enabled=true: set it, or compare to false")
        return self
