"""Jobs that a program asks of the ranks' generators."""

from dataclasses import dataclass

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.generator_messages import Generate
from automodel_rl.launch.door import DoorAddress
from automodel_rl.policy.jobs import Job


@dataclass(frozen=True)
class StartGenerators(Job):
    """Start generators. The answers, of ranks that lead one, are pairs of the rank and of whether it works alone.

    Attributes:
        spec: the generator that is asked for.
        address: where the program waits for these ranks.
    """

    answered_by = "all"

    spec: GeneratorSpec
    address: DoorAddress


@dataclass(frozen=True)
class WelcomeGenerators(Job):
    """Tell what generators that join need. The answer is a `joining.Welcome`.

    Attributes:
        spec: the generator that is asked for.
    """

    spec: GeneratorSpec


@dataclass(frozen=True)
class PublishedVersion(Job):
    """Tell which version the weights have that were published last. The answer is the version and its hash, or None if
    they could not be."""


@dataclass(frozen=True)
class SyncWeights(Job):
    """Give generators the weights that the model has now. Those that sleep get them when they wake. The answers, of
    ranks whose generator has failed, are pairs of the rank and of why.

    Attributes:
        policy_version: the policy version of these weights.
        needed: number of the oldest published version that somebody still reads; None if there is none.
    """

    answered_by = "all"

    policy_version: int
    needed: int | None = None


@dataclass(frozen=True)
class Wake(Job):
    """Let generators write, in memory that they share with the trainer. The answers are as to `SyncWeights`."""

    answered_by = "all"


@dataclass(frozen=True)
class Sleep(Job):
    """Let generators give shared memory back. The answer is a warning about memory, "" if there is none."""


@dataclass(frozen=True)
class Restore(Job):
    """Bring the trainer's weights back to the device."""


@dataclass(frozen=True)
class Write(Job):
    """Let generators that share their rank's process write completions, which go to the program as they come.

    Attributes:
        requests: the requests of each rank.
    """

    requests: dict[int, list[Generate]]


@dataclass(frozen=True)
class RestartGenerators(Job):
    """Start generators again that have failed, with the weights that the model has now. The answers are as to
    `SyncWeights`.

    Attributes:
        lost: why the program holds a generator for lost, by its rank.
        given_up: ranks whose generators are not started this time.
    """

    answered_by = "all"

    lost: dict[int, str]
    given_up: frozenset[int] = frozenset()


@dataclass(frozen=True)
class CloseGenerators(Job):
    """End the generators."""
