"""Combinations of a model, a layout and settings, which the table judges."""

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
    """A combination that is asked for: a model, how it computes, its layout, what saves memory, and the run.

    Attributes:
        run: the whole config; None for a model that is loaded without a run. Rules of runs do not judge that.
    """

    description: ModelDescription
    model: ModelConfig
    parallel: ParallelConfig
    memory: MemoryConfig
    components: ComponentsConfig | None = None
    run: RunConfig | None = None

    @classmethod
    def of_run(cls, description: ModelDescription, run: RunConfig) -> "Combination":
        """The combination that the config of a run asks for."""
        return cls(description, run.model, run.parallel, run.memory, run.components, run)

    @property
    def family(self) -> Family:
        """Facts of the (language) model's family, which must be a known one."""
        return FAMILIES[self.description.family]

    @property
    def generation(self) -> RolloutRunConfig | None:
        """The run's config if the run generates completions; None without a run, too."""
        return None if self.run is None else self.run.generation

    @property
    def splits_backward(self) -> bool:
        """Whether a pipeline computes gradients of inputs and of weights at different times."""
        return self.parallel.pp > 1 and SCHEDULES[self.parallel.schedule].splits_backward
