"""Combinations of a model, a layout and settings, to be checked against the table."""

from dataclasses import dataclass

from automodel_rl.config import (
    ComponentsConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    RolloutRunConfig,
    RunConfig,
)
from automodel_rl.families.family import Family
from automodel_rl.families.known import FAMILIES
from automodel_rl.parallel.pipeline.schedules import SCHEDULES
from automodel_rl.support.description import ModelDescription


@dataclass(frozen=True)
class Combination:
    """A requested combination of model, precision, layout, memory savings and run.

    Attributes:
        run: the whole config; None for a model that is loaded without a run, which rules for runs ignore.
    """

    description: ModelDescription
    model: ModelConfig
    parallel: ParallelConfig
    memory: MemoryConfig
    components: ComponentsConfig | None = None
    run: RunConfig | None = None

    @classmethod
    def of_run(cls, description: ModelDescription, run: RunConfig) -> "Combination":
        """Returns the combination requested by the config of a run."""
        return cls(description, run.model, run.parallel, run.memory, run.components, run)

    @property
    def family(self) -> Family:
        """Facts about the (language) model's family, which must be known."""
        return FAMILIES[self.description.family]

    @property
    def generation(self) -> RolloutRunConfig | None:
        """The run's config if the run generates completions; otherwise None."""
        return None if self.run is None else self.run.generation

    @property
    def splits_backward(self) -> bool:
        """Whether the pipeline computes gradients of inputs and of weights at different times."""
        return self.parallel.pp > 1 and SCHEDULES[self.parallel.schedule].splits_backward
