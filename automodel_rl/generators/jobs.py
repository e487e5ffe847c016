"""Jobs that a program asks of the ranks' generators."""

from dataclasses import dataclass

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.generator_messages import Request
from automodel_rl.policy.jobs import Job


@dataclass(frozen=True)
class StartGenerators(Job):
    """Start the generator of each rank."""

    spec: GeneratorSpec


@dataclass(frozen=True)
class SyncWeights(Job):
    """Give generators the weights that the model has now. Those that sleep get them when they wake.

    Attributes:
        is_new: whether they are a new policy version.
    """

    is_new: bool


@dataclass(frozen=True)
class Wake(Job):
    """Let generators write, in memory that they share with the trainer."""


@dataclass(frozen=True)
class Sleep(Job):
    """Let generators give shared memory back. The answer is a warning about memory, "" if there is none."""


@dataclass(frozen=True)
class Restore(Job):
    """Bring the trainer's weights back to the device."""


@dataclass(frozen=True)
class Write(Job):
    """Let generators write completions, which are dealt to them. The answers are completions by their places."""

    answered_by = "all"

    requests: list[Request]


@dataclass(frozen=True)
class WriteAlike(Job):
    """Let each generator write all of these completions. The answers are lists of completions without routes, empty
    from a generator that could not write."""

    answered_by = "all"

    requests: list[Request]


@dataclass(frozen=True)
class RestartGenerators(Job):
    """Start generators again that have failed, with the weights that the model has now."""


@dataclass(frozen=True)
class CloseGenerators(Job):
    """End the generators."""
