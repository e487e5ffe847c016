"""What a rule of the table is, what it judges, and what it refuses for example."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from automodel_rl.config import ComponentsConfig, MemoryConfig, ModelConfig, ParallelConfig, RunConfig
from automodel_rl.parallel.pipeline.schedules import SCHEDULES
from automodel_rl.support.description import ModelDescription
from automodel_rl.support.families import FAMILIES, Family


@dataclass(frozen=True)
class Combination:
    """What is asked for: a model, how it computes, its layout, what spares memory, and the run that trains it.

    Attributes:
        run: the whole config; None for a model that is loaded without a run, by which rules of runs do not judge.
    """

    description: ModelDescription
    model: ModelConfig
    parallel: ParallelConfig
    memory: MemoryConfig
    components: ComponentsConfig | None = None
    run: RunConfig | None = None

    @classmethod
    def of_run(cls, description: ModelDescription, run: RunConfig) -> "Combination":
        """What the config of a run asks for."""
        return cls(description, run.model, run.parallel, run.memory, run.components, run)

    @property
    def family(self) -> Family:
        """Facts of the (language) model's family, which must be a known one."""
        return FAMILIES[self.description.family]

    @property
    def splits_backward(self) -> bool:
        """Whether a pipeline computes gradients of inputs and of weights at different times."""
        return self.parallel.pp > 1 and SCHEDULES[self.parallel.schedule].splits_backward


Refusal = Callable[[Combination], str | None]
"""What to say to a combination that breaks a rule; None to any other."""

Keys = Mapping[str, Any]
"""Values by dotted key: of a config, as in a file, or of the `description` of a model."""


@dataclass(frozen=True)
class Example:
    """Something that a rule refuses. Without `asks` it is supported, so no other rule has a part in the refusal.

    Attributes:
        says: how the refusal begins.
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
        feature: what it is about.
        supported: what of it works.
        refusal: what to say to a combination that asks for more; None where there is nothing to refuse.
        refuses: an example of each of its refusals.
    """

    feature: str
    supported: str
    refusal: Refusal | None = None
    refuses: tuple[Example, ...] = ()
