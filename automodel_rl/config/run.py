"""Config sections that every run has (length, checkpoints, metrics, failures), and the base classes of run configs."""

import abc
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from automodel_rl.config.base import PathText, Positive, Section
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.data import CommonBatchConfig, PromptDataConfig, SourcesConfig
from automodel_rl.config.further_models import FurtherModel
from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import JoinedGeneratorConfig, VllmGeneratorConfig
from automodel_rl.config.launch import LaunchConfig
from automodel_rl.config.model import MemoryConfig, ModelConfig
from automodel_rl.config.optimizer import OptimizerConfig
from automodel_rl.config.parallel import ParallelConfig
from automodel_rl.config.rollout import RolloutConfig, RouterReplayConfig, WeightSyncConfig
from automodel_rl.config.validation import ValidationConfig

Records = Literal["chats", "pairs", "ranked pairs", "judged", "prompts"]

TrackerName = Literal["tensorboard", "wandb", "trackio"]


class LengthConfig(Section):
    """Length of a run: exactly one of `steps` and `epochs`."""

    steps: Positive | None = None
    """Number of steps. A step trains on one global batch; with grpo, on one batch of rollouts."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Number of passes over the training data. The last step may have fewer sequences."""

    validate_every: Positive | None = None
    """Number of steps between validations. The last step always validates; null: only the last step."""

    @model_validator(mode="after")
    def _one_limit(self) -> "LengthConfig":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("set exactly one of steps and epochs")
        return self


class CheckpointConfig(Section):
    every_steps: Positive | None = 100
    """Number of steps between checkpoints. The last step also writes one, as does the best one with keep_best. null: no
    checkpoints by steps, nor at the end."""

    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes between checkpoints, in addition to every_steps; null: off."""

    keep_last: Positive = 2
    """Number of latest checkpoints to keep."""

    keep_best: bool = True
    """Also keep the checkpoint with the best val/loss (grpo: val/reward_mean). Each step with a new best validation
    writes a checkpoint, unless every_steps and every_minutes are null."""

    load_best: bool = False
    """Write the best checkpoint to final/ at the end, rather than the last step."""

    in_background: Annotated[bool, Field(alias="async")] = True
    """Write checkpoints while training continues, from a copy of all weights and moments in host memory. false:
    training waits, and no copy is made."""

    format: Literal["sharded", "both"] = "sharded"
    """sharded: the ranks' shards, from which any layout can resume. both: also a Hugging Face checkpoint in hf/,
    converted from the shards by a separate process."""

    accept_changed_inputs: bool = False
    """Resume even if training data, tokenizer or chat template have changed since the checkpoint. The position in the
    data is kept, and refers to different records if some were added or removed."""

    @model_validator(mode="after")
    def _keeps_the_best(self) -> "CheckpointConfig":
        if self.load_best and not (self.keep_best and (self.every_steps or self.every_minutes)):
            raise ValueError("load_best=true needs checkpoints: set keep_best, and every_steps or every_minutes")
        return self


class ObserveConfig(Section):
    samples: Annotated[int, Field(ge=0)] = 4
    """Number of greedy completions of the trained model to show in report.html, for validation prompts, or training
    prompts if there are none."""

    sample_tokens: Positive = 64
    """Maximum tokens of these completions."""

    trackers: tuple[TrackerName, ...] = ()
    """Trackers that receive the metrics in addition to metrics.jsonl: TensorBoard (files in the run directory), Weights
    & Biases, trackio."""

    project: str = "automodel_rl"
    """Project name in these trackers."""


class FailuresConfig(Section):
    hang_minutes: Annotated[float, Field(gt=0)] | None = 60.0
    """Maximum minutes that a rank may spend on one operation, such as a microbatch or a batch of rollouts. Then the
    rank counts as hung, and the job ends. null: no limit."""


def refuse_idle_data_ranks(what: str, count: int, parallel: ParallelConfig) -> None:
    """Raises ValueError if a step has fewer examples than there are data ranks, some of which would never get data.

    Args:
        what: key or formula of keys that gives `count`, for the message.
        count: number of examples per step.
        parallel: layout of the run.
    """
    ranks = parallel.num_data_ranks
    if count < ranks:
        raise ValueError(
            f"{what}={count} must be at least {ranks}, the number of data ranks (parallel.dp_shard x "
            "parallel.dp_replicate), or some would get no data: raise it"
        )


class RunConfig(Section, abc.ABC):
    """The keys of every run, and properties by which lower layers query a run without knowing its algorithm.

    Example:
        >>> config = load_config("my_dpo.yaml")
        >>> config.record_type, config.needs_reference, config.generation
        ('pairs', True, None)
    """

    output: PathText
    """Run directory. Receives config.yaml, metrics.jsonl, report.html, checkpoints/ and final/."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed for data order, sampling and torch."""

    model: ModelConfig
    data: SourcesConfig
    batch: CommonBatchConfig
    length: LengthConfig

    loss_function: str | None = None
    """Import path `package.module:function` of a custom loss, called as function(outputs, microbatch) in place of the
    algorithm's own."""

    parallel: ParallelConfig = ParallelConfig()

    components: ComponentsConfig | None = None
    """Meshes for the components of a multimodal model, in place of `parallel`. By default all components are on all
    ranks."""

    memory: MemoryConfig = MemoryConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    failures: FailuresConfig = FailuresConfig()
    launch: LaunchConfig = LaunchConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    @abc.abstractmethod
    def record_type(self) -> Records:
        """Type of the data's records."""

    @property
    @abc.abstractmethod
    def sequences_per_step(self) -> int:
        """Token sequences per optimizer step, over all data ranks."""

    @property
    def longest_sequence(self) -> int:
        """Number of tokens that a microbatch must hold; 0 if longer examples are truncated or dropped."""
        return 0

    @property
    def trained_turns(self) -> Literal["all", "last"]:
        """Assistant turns of a chat that are trained."""
        return "all"

    @property
    def answer_reader(self) -> str | None:
        """Name of the built-in reward that needs an `answer` in each record; None if there is none."""
        return None

    @property
    def needs_reference(self) -> bool:
        """Whether the initial weights are kept as the reference policy."""
        return False

    @property
    def compares_logprobs(self) -> bool:
        """Whether log-probabilities of the same sequence from several passes are compared, so that noise such as
        dropout would change the loss."""
        return True

    @property
    def has_likelihood_loss(self) -> bool:
        """Whether the loss is the mean negative log-likelihood of the trained tokens."""
        return False

    @property
    def trains_linear_head(self) -> bool:
        """Whether the model has a linear head rather than the vocabulary's."""
        return False

    @property
    def further_models(self) -> dict[str, FurtherModel]:
        """Additional models by name."""
        return {}

    @property
    def generation(self) -> "RolloutRunConfig | None":
        """The config itself if the run generates completions during training; otherwise None."""
        return None

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.parallel.world_size if self.components is None else self.components.world_size

    @model_validator(mode="after")
    def _has_its_head(self) -> "RunConfig":
        if self.model.num_labels is not None and not self.trains_linear_head:
            raise ValueError(
                f"model.num_labels={self.model.num_labels}: this run needs the vocabulary head: remove it, or train a "
                "reward model with algorithm reward"
            )
        return self

    @model_validator(mode="after")
    def _has_reference(self) -> "RunConfig":
        if self.memory.reference != "auto" and not self.needs_reference:
            raise ValueError(
                f"memory.reference={self.memory.reference}: this run keeps no reference policy: set it to auto, or use "
                "a loss that needs one"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _language_layout(cls, values: Any) -> Any:
        """Copies the language component's layout to `parallel`, where other code reads it."""
        if not isinstance(values, dict) or values.get("components") is None:
            return values
        try:
            language = ComponentsConfig.model_validate(values["components"]).language.parallel
            given = ParallelConfig.model_validate(values.get("parallel") or language)
        except ValidationError:
            return values  # the sections' own validators report the error
        if given != language:
            raise ValueError("parallel and components.language differ: set the layout in components.language only")
        return {**values, "parallel": language.model_dump()}


class RolloutRunConfig(RunConfig):
    """A run that trains on completions generated by the trained model.

    Example:
        >>> config = load_config("my_grpo.yaml")
        >>> config.generation is config, config.rollout.generator.kind, config.longest_sequence
        (True, 'transformers', 74)
    """

    data: PromptDataConfig
    rollout: RolloutConfig
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()
    validation: ValidationConfig = ValidationConfig()

    @property
    def record_type(self) -> Records:
        """Type of the data's records."""
        return "prompts"

    @property
    def generation(self) -> "RolloutRunConfig":
        """The config itself, since the run generates completions."""
        return self

    @property
    def sleep_level(self) -> int:
        """vLLM sleep level between rollouts; 0: generators stay awake."""
        generator = self.rollout.generator
        if not isinstance(generator, VllmGeneratorConfig) or generator.sleep == "none":
            return 0
        return (1 if self.weight_sync.adapters == "alone" else 2) if generator.sleep == "auto" else generator.sleep

    @property
    def has_stop_texts(self) -> bool:
        """Whether requests may have stop strings: from the config, agents or evaluations."""
        evaluates = self.validation.lm_eval is not None or self.validation.inspect is not None
        return bool(self.rollout.stop) or self.rollout.has_agent or evaluates

    @property
    def generator_spec(self) -> GeneratorSpec:
        """The generator of each rank."""
        rollout, data = self.rollout, self.data
        return GeneratorSpec(
            rollout.generator,
            self.longest_sequence,
            self.weight_sync,
            self.sleep_level,
            self.shares_memory,
            rollout.stop_token_ids,
            self.has_stop_texts,
            self.router_replay.enabled,
            (data.min_pixels, data.max_pixels),
            data.chat_template_kwargs,
            rollout.max_staleness + 2,
        )

    def _check_joined(self, evaluators: int) -> None:
        """Rejects features that joined generators lack, since all they get from ranks are published weights."""
        if evaluators and not self.data.validation:
            raise ValueError(
                f"rollout.generator.evaluators={evaluators} without data.validation: they complete held-out prompts: "
                "set it, or remove evaluators"
            )
        if evaluators and self.rollout.has_agent:
            raise ValueError(
                f"rollout.generator.evaluators={evaluators} with rollout.agent: agents use the training generators: "
                "remove evaluators"
            )
        if self.weight_sync.publish is None:
            raise ValueError(
                "rollout.generator.kind=joined: generators that join read published weights: set weight_sync.publish "
                "to a folder that they share"
            )
        if self.weight_sync.checksum:
            raise ValueError(
                "weight_sync.checksum=true with rollout.generator.kind=joined: published weights have checksums, which "
                "are always compared: remove it"
            )

    @property
    def shares_memory(self) -> bool:
        """Whether generators and trainer use device memory in turns."""
        return bool(self.sleep_level or self.memory.offload)

    @property
    def longest_sequence(self) -> int:
        """Maximum tokens of a prompt with its completion or conversation."""
        return self.rollout.max_prompt_tokens + self.rollout.completion_tokens

    @property
    def longest_keys(self) -> str:
        """Keys whose values add up to `longest_sequence`, for error messages."""
        rollout = self.rollout
        if not rollout.has_turns:
            return "rollout.max_prompt_tokens + rollout.max_new_tokens"
        if rollout.max_tokens is not None:
            return "rollout.max_prompt_tokens + rollout.max_tokens"
        return "rollout.max_prompt_tokens + rollout.max_turns x rollout.max_new_tokens"

    @model_validator(mode="after")
    def _holds_the_longest(self) -> "RolloutRunConfig":
        tokens, longest = self.batch.microbatch_tokens, self.longest_sequence
        if tokens != "auto" and tokens < longest:
            raise ValueError(
                f"batch.microbatch_tokens={tokens} must hold the longest prompt and completion, {self.longest_keys} = "
                f"{longest}: raise it, or lower one of these"
            )
        return self

    @model_validator(mode="after")
    def _generators_fit(self) -> "RolloutRunConfig":
        rollout, generator = self.rollout, self.rollout.generator
        if self.weight_sync.checksum and generator.runs_vllm:
            raise ValueError(
                "weight_sync.checksum=true: vLLM stores weights in other shapes than checkpoints, so they cannot be "
                "compared: set it to false"
            )
        if isinstance(generator, JoinedGeneratorConfig):
            self._check_joined(generator.evaluators)
        elif self.launch.ray is not None and self.launch.ray.generators:
            raise ValueError(
                f"launch.ray.generators={self.launch.ray.generators}: generators only join runs with "
                "rollout.generator.kind=joined: set that, or remove it"
            )
        if self.memory.offload is not None and generator.has_own_memory:
            where = f"place={[*generator.devices]}" if generator.devices else f"kind={generator.kind}"
            raise ValueError(
                f"memory.offload: rollout.generator.{where} does not share the trainer's memory and could not use it: "
                "remove it"
            )
        if self.sleep_level == 2 and self.weight_sync.adapters == "alone":
            raise ValueError(
                "rollout.generator.sleep=2 with weight_sync.adapters=alone: the weights that vLLM drops are not sent "
                "again: use 1 or auto"
            )
        size = generator.tensor_parallel if isinstance(generator, VllmGeneratorConfig) else 1
        if not generator.has_own_memory and self.world_size % size:
            raise ValueError(
                f"rollout.generator.tensor_parallel={size} does not divide the {self.world_size} ranks: use a divisor"
            )
        if rollout.max_staleness and self.shares_memory:
            key = "rollout.generator.sleep" if self.sleep_level else "memory.offload"
            raise ValueError(
                f"{key} with rollout.max_staleness={rollout.max_staleness}: generators run while the model trains, so "
                "neither can free its memory: remove one of them"
            )
        return self


AnyRun = TypeVar("AnyRun", bound=RunConfig)
