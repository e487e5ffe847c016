"""Messages between the server and the ranks: jobs and their results."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from automodel_rl.rollout.sampled import SamplePrompt

TARGETS = "target_tokens"
"""Input name of a datum's targets."""


@dataclass(frozen=True)
class Datum:
    """One sequence with its own targets.

    Attributes:
        tokens: input tokens, int64 [n].
        inputs: arrays of the loss by name, each [n]: `target_tokens` (int64) and others (float32). Index t belongs
            to the prediction at position t. Arrays of a cross entropy may be [n, K], with several targets per token.
    """

    tokens: np.ndarray
    inputs: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        """Number of targets per token if the targets are [n, K], otherwise 0."""
        targets = self.inputs.get(TARGETS)
        return 0 if targets is None or targets.ndim < 2 else targets.shape[1]

    @property
    def trained(self) -> np.ndarray:
        """The positions that the loss counts, bool [n]: those with a weight, or an advantage, that is not 0."""
        counted = self.inputs.get("weights", self.inputs.get("advantages"))
        if counted is None:
            return np.ones(len(self), bool)
        return (counted != 0).reshape(len(self), -1).any(axis=1)


@dataclass(frozen=True)
class RunShape:
    """The part of the model that a run trains.

    Attributes:
        rank: rank of its adapters; 0 for all weights.
        seed: seed of the adapters' initial values.
        attention, mlp: whether attention layers, and the other layers, have adapters.
        first: its first row in the model's adapters, which may have a larger rank. Runs without a common row can
            share a pass.
    """

    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    first: int = 0

    @property
    def rows(self) -> slice:
        """The run's rows in the model's adapters."""
        return slice(self.first, self.first + self.rank)


class ServiceJob:
    """Base class of jobs, which the ranks run one at a time."""

    @property
    def title(self) -> str:
        """Name for display."""
        return type(self).__name__


@dataclass(frozen=True)
class Stop(ServiceJob):
    """Ends the ranks."""


@dataclass(frozen=True)
class RunMethodCall(ServiceJob):
    """A call of a method of `Runs` for a run. The answer is None, or metrics by name for `optimizer_step`.

    Attributes:
        arguments: the arguments after the run.
    """

    run: str
    method: str
    arguments: tuple[Any, ...] = ()

    @property
    def title(self) -> str:
        return self.method


@dataclass(frozen=True)
class RunPass(ServiceJob):
    """A forward-backward that accumulates gradients of a loss, or with `forward_only` just computes it. The answer
    is a `LossResult`."""

    run: str
    loss: str
    settings: dict[str, float]
    data: list[Datum]
    forward_only: bool
    shape: RunShape

    @property
    def width(self) -> int:
        """Largest number of targets per token, which applies to all tokens of a pass; 0 if each has one."""
        return max((datum.width for datum in self.data), default=0)


@dataclass(frozen=True)
class CombinedPass(ServiceJob):
    """Jobs of several runs in one pass, all forward-backward or all forward-only. Their adapters have no common row.
    The answer is a list of `LossResult` or `Refused`."""

    jobs: list[RunPass]


@dataclass(frozen=True)
class LossResult:
    """Result of a forward-backward.

    Attributes:
        loss: the sum over all tokens.
        logprobs: log-probabilities of each datum's targets, float32 [n] or [n, K].
    """

    loss: float
    logprobs: list[np.ndarray]


@dataclass(frozen=True)
class Forget(ServiceJob):
    """Drops runs and kept weights. The answer is None."""

    runs: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampleJob(ServiceJob):
    """Prompts for the same weights: kept under a name, in a folder, or the base model if neither. The answer is a
    list of `Sampled` or `Refused`."""

    kept: str | None
    folder: str | None
    shape: RunShape | None
    prompts: list[SamplePrompt]


@dataclass(frozen=True)
class TeacherJob(ServiceJob):
    """Prompts for a further base model to score. The answer is a list of `Sampled` or `Refused`."""

    teacher: str
    prompts: list[SamplePrompt]


@dataclass(frozen=True)
class Done:
    """A completed job.

    Attributes:
        answer: its answer, or `Refused`.
        peak_bytes: peak memory of rank 0 on its device or, without one, on the host.
    """

    answer: Any
    peak_bytes: int


@dataclass(frozen=True)
class StopRequested:
    """Rank 0 received a stop signal. The server then saves all runs and stops the ranks."""


@dataclass(frozen=True)
class Ready:
    """Rank 0's first message: the ranks accept jobs.

    Attributes:
        vocab_size: vocabulary size of the model.
        teacher_vocab_sizes: vocabulary sizes of further base models, by name.
    """

    vocab_size: int
    teacher_vocab_sizes: dict[str, int]
