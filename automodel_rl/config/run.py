"""Config sections that every run has: length, checkpoints, metrics and failures, and the base of all run configs."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from automodel_rl.config.base import PathText, Positive, Section
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.data import CommonBatchConfig, SourcesConfig
from automodel_rl.config.launch import LaunchConfig
from automodel_rl.config.model import MemoryConfig, ModelConfig
from automodel_rl.config.optimizer import OptimizerConfig
from automodel_rl.config.parallel import ParallelConfig

TrackerName = Literal["tensorboard", "wandb", "trackio"]


class LengthConfig(Section):
    """The length of a run: give `steps` or `epochs`, not both."""

    steps: Positive | None = None
    """Number of steps. A step trains on one global batch; with grpo, on one batch of rollouts."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Number of passes over the training data. The last step may have fewer sequences."""

    validate_every: Positive | None = None
    """Number of steps between validations. The last step always validates; null validates only there."""

    @model_validator(mode="after")
    def _one_limit(self) -> "LengthConfig":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        return self


class CheckpointConfig(Section):
    every_steps: Positive | None = 100
    """Number of steps between checkpoints. The last step writes one, too, and with keep_best the best one. null: no
    checkpoints by steps, also not at the end."""

    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes between checkpoints, in addition to every_steps. null: minutes do not count."""

    keep_last: Positive = 2
    """Number of newest checkpoints to keep."""

    keep_best: bool = True
    """Also keep the best checkpoint by val/loss, for grpo by val/reward_mean. A step whose validation is the best so
    far writes a checkpoint, also where none is due, unless every_steps and every_minutes are null."""

    load_best: bool = False
    """Write the best checkpoint to final/ at the end, in place of the last step."""

    in_background: Annotated[bool, Field(alias="async")] = True
    """Write checkpoints while training goes on, from a copy of all weights and moments in host memory. false: training
    waits, and no copy is needed."""

    format: Literal["sharded", "both"] = "sharded"
    """sharded: the ranks' shards, to resume from on any layout. both: also a Hugging Face checkpoint in hf/, which
    another process makes from the shards."""

    accept_changed_inputs: bool = False
    """Go on also where training data, tokenizer or chat template are no longer those of the checkpoint. The place in
    the data is kept, and means other records if there are more or fewer of them."""

    @model_validator(mode="after")
    def _keeps_the_best(self) -> "CheckpointConfig":
        if self.load_best and not (self.keep_best and (self.every_steps or self.every_minutes)):
            raise ValueError("load_best=true needs checkpoints: set keep_best, and every_steps or every_minutes")
        return self


class ObserveConfig(Section):
    samples: Annotated[int, Field(ge=0)] = 4
    """Number of completions of the trained model to show in report.html. They are greedy, for prompts of the validation
    data, or of the training data if there is none."""

    sample_tokens: Positive = 64
    """Most tokens of these completions."""

    trackers: tuple[TrackerName, ...] = ()
    """Trackers that get the metrics besides metrics.jsonl: TensorBoard (files in the run directory), Weights & Biases,
    trackio."""

    project: str = "automodel_rl"
    """Name of the run's project in these trackers."""


class FailuresConfig(Section):
    hang_minutes: Annotated[float, Field(gt=0)] | None = 60.0
    """Most minutes that a rank may spend on one thing, such as one microbatch or one batch of rollouts. After that it
    counts as hanging, and the job ends. null: ranks wait for ever."""


def refuse_idle_data_ranks(what: str, count: int, parallel: ParallelConfig) -> None:
    """Raises ValueError if a step has fewer examples than there are data ranks: some ranks would never see data.

    Args:
        what: the key, or the formula of keys, that gives `count`; for the message.
        count: number of examples of a step.
        parallel: the layout, which gives the number of data ranks.
    """
    ranks = parallel.num_data_ranks
    if count < ranks:
        raise ValueError(
            f"{what}={count} must be at least the {ranks} data ranks (parallel.dp_shard x parallel.dp_replicate), or "
            "some would never see data: raise it"
        )


class RunConfig(Section):
    output: PathText
    """Run directory. It gets config.yaml, metrics.jsonl, report.html, checkpoints/ and final/."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed for the order of the data, for sampling, and for torch."""

    model: ModelConfig
    data: SourcesConfig
    batch: CommonBatchConfig
    length: LengthConfig

    loss_function: str | None = None
    """Import path `package.module:function` of a loss that replaces the algorithm's own. It is called as
    function(outputs, microbatch), with the same arguments."""

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
    def needs_reference(self) -> bool:
        """Whether the weights that the run began with are needed to its end, as the reference policy."""
        return False

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.parallel.world_size if self.components is None else self.components.world_size

    @model_validator(mode="after")
    def _has_reference(self) -> "RunConfig":
        if self.memory.reference != "auto" and not self.needs_reference:
            raise ValueError(
                f"memory.reference={self.memory.reference}: this run keeps no reference policy: set it to auto, or "
                "choose a loss that compares with one"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _language_layout(cls, values: Any) -> Any:
        """Sets `parallel` to the language component's layout, so that code finds it in one place."""
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
