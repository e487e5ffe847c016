"""What every run has: its length, checkpoints, what it shows, what counts as a failure; and all together."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from automodel_rl.config.base import PathText, Positive, Section
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.data import CommonBatchConfig, SourcesConfig
from automodel_rl.config.model import MemoryConfig, ModelConfig
from automodel_rl.config.optimizer import OptimizerConfig
from automodel_rl.config.parallel import ParallelConfig

TrackerName = Literal["tensorboard", "wandb", "trackio"]


class LengthConfig(Section):
    """How long a run is: give `steps` or `epochs`, not both."""

    steps: Positive | None = None
    """Steps, each over one global batch."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training data; the last step may have fewer sequences."""

    validate_every: Positive | None = None
    """Steps between validations; null validates only at the end."""

    @model_validator(mode="after")
    def _one_limit(self) -> "LengthConfig":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        return self


class CheckpointConfig(Section):
    every_steps: Positive | None = 100
    """Steps between checkpoints, the last one at the end; null counts no steps."""

    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes between checkpoints, besides those of every_steps; null counts none."""

    keep_last: Positive = 2
    """Newest checkpoints kept."""

    keep_best: bool = True
    """Also keep the best one of those written at a step that validates: by val/loss, of grpo by val/reward_mean."""

    in_background: Annotated[bool, Field(alias="async")] = True
    """Write while training goes on, from a copy on the host of all weights and moments; false writes them directly,
    while training waits."""

    format: Literal["sharded", "both"] = "sharded"
    """sharded: the ranks' shards, to resume from on any layout. both: also a Hugging Face checkpoint in hf/, made of
    them by a process of its own."""


class ObserveConfig(Section):
    samples: Annotated[int, Field(ge=0)] = 4
    """Completions of the trained model in report.html, greedy, for prompts of the validation (else training) data."""

    sample_tokens: Positive = 64
    """Longest of these completions."""

    trackers: tuple[TrackerName, ...] = ()
    """Where metrics go besides metrics.jsonl: TensorBoard files in the run directory, Weights & Biases, trackio."""

    project: str = "automodel_rl"
    """Project of the run for these trackers."""


class FailuresConfig(Section):
    hang_minutes: Annotated[float, Field(gt=0)] | None = 60.0
    """Minutes in which a rank may do one thing, such as one microbatch or one batch of rollouts, before it counts as
    hanging and the job ends; null waits for ever."""


def refuse_idle_data_ranks(what: str, count: int, parallel: ParallelConfig) -> None:
    """Raises ValueError where a step has fewer examples than data ranks, some of which would never see data.

    Args:
        what: the key, or the product of keys, that `count` is.
        count: examples of a step.
        parallel: with the data ranks.
    """
    ranks = parallel.num_data_ranks
    if count < ranks:
        raise ValueError(
            f"{what}={count} must be at least the {ranks} data ranks (parallel.dp_shard x parallel.dp_replicate), or "
            "some would never see data: raise it"
        )


class RunConfig(Section):
    output: PathText
    """Run directory: config.yaml, metrics.jsonl, report.html, checkpoints/, final/."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the data order, of sampling and of torch."""

    model: ModelConfig
    data: SourcesConfig
    batch: CommonBatchConfig
    length: LengthConfig

    loss_function: str | None = None
    """Import path `package.module:function` of a loss in place of the algorithm's own, called as
    function(outputs, batch) with what that one gets."""

    parallel: ParallelConfig = ParallelConfig()

    components: ComponentsConfig | None = None
    """Meshes of their own for the components of a vision-language model, in place of `parallel`, which is then the
    language model's; by default both are on all ranks."""

    memory: MemoryConfig = MemoryConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    failures: FailuresConfig = FailuresConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.parallel.world_size if self.components is None else self.components.world_size

    @model_validator(mode="before")
    @classmethod
    def _language_layout(cls, values: Any) -> Any:
        """Takes `parallel` from the language component, so that there is one place to ask."""
        if not isinstance(values, dict) or values.get("components") is None:
            return values
        try:
            language = ComponentsConfig.model_validate(values["components"]).language.parallel
            given = ParallelConfig.model_validate(values.get("parallel") or language)
        except ValidationError:
            return values  # the sections' own checks will say where it is wrong
        if given != language:
            raise ValueError("parallel and components.language differ: give the layout in components.language alone")
        return {**values, "parallel": language.model_dump()}
