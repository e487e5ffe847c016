"""Rules of the table, the combinations that they judge, and examples of what they refuse."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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


Refusal = Callable[[Combination], str | None]
"""Gives the text that refuses a combination; None for a combination that keeps the rule."""

Keys = Mapping[str, Any]
"""Values by dotted key. A key is one of a config, as in a file, or one of a model's `description`."""


@dataclass(frozen=True)
class Breach:
    """An example of what a rule refuses. Without `asks` it is supported, so no other rule has a part in the refusal.

    Attributes:
        says: the beginning of the refusal.
        asks: the keys that are refused.
        beside: further keys, which are supported without `asks`.
    """

    says: str
    asks: Keys
    beside: Keys = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Attributes:
        feature: the feature that the rule is about.
        supported: text that says how far the feature is supported.
        refusal: refuses a combination that asks for more; None if there is nothing to refuse.
        refuses: an example of each refusal.
    """

    feature: str
    supported: str
    refusal: Refusal | None = None
    refuses: tuple[Breach, ...] = ()
