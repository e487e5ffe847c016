"""Messages between the server and the ranks: jobs, their results, and what they are made of."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from automodel_rl.rollout.sampled import SamplePrompt

TARGETS = "target_tokens"
"""The name of a datum's targets."""


@dataclass(frozen=True)
class Datum:
    """One sequence with targets of its own.

    Attributes:
        tokens: input tokens, int64 [n].
        inputs: arrays of the loss by name, each [n], aligned with the positions that predict: `target_tokens`, int64,
            and others, float32. Those of a cross entropy may have several targets for each, [n, K].
    """

    tokens: np.ndarray
    inputs: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        """Number of targets for each token; 0 for one."""
        targets = self.inputs.get(TARGETS)
        return 0 if targets is None or targets.ndim < 2 else targets.shape[1]


@dataclass(frozen=True)
class RunShape:
    """What of the model a training run trains.

    Attributes:
        rank: rank of its adapters.
        seed: seed of their first values.
        attention, mlp: whether attention layers, and the other layers, have adapters.
        first: the first of their rows in the model's adapters, which may have a larger rank. Runs that share no row can
            meet in one pass.
    """

    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    first: int = 0

    @property
    def rows(self) -> slice:
        """The rows that the run has in the model's adapters."""
        return slice(self.first, self.first + self.rank)


class ServiceJob:
    """The base of all jobs. Ranks run them one after the other."""

    @property
    def title(self) -> str:
        """What it is called for people."""
        return type(self).__name__


@dataclass(frozen=True)
class Stop(ServiceJob):
    """The ranks must end."""


@dataclass(frozen=True)
class OfRun(ServiceJob):
    """A method of `Runs` to call for a run. The answer is None; of `optimizer_step` it is metrics by name.

    Attributes:
        run: the run, which is the first argument.
        method: the name of the method.
        arguments: the other arguments.
    """

    run: str
    method: str
    arguments: tuple[Any, ...] = ()

    @property
    def title(self) -> str:
        """The method."""
        return self.method


@dataclass(frozen=True)
class RunPass(ServiceJob):
    """Gradients of a loss to add up; `forward_only` for its results alone. `shape` is that of the run. The answer is a
    `LossResult`."""

    run: str
    loss: str
    settings: dict[str, float]
    data: list[Datum]
    forward_only: bool
    shape: RunShape

    @property
    def width(self) -> int:
        """The most targets of a token, for in a pass all tokens have as many; 0 if all have one."""
        return max((datum.width for datum in self.data), default=0)


@dataclass(frozen=True)
class Together(ServiceJob):
    """Forwards and backwards of several runs, or forwards alone, that meet in one pass. Their adapters share no row.
    The answer has one for each, perhaps `Refused`."""

    jobs: list[RunPass]


@dataclass(frozen=True)
class LossResult:
    """The result of a forward and backward.

    Attributes:
        loss: the sum over all tokens.
        logprobs: log-probabilities of each datum's targets, float32 [n], or [n, K] of those with several each.
    """

    loss: float
    logprobs: list[np.ndarray]


@dataclass(frozen=True)
class Forget(ServiceJob):
    """Runs and kept weights that are not needed any more. The answer is None."""

    runs: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampleJob(ServiceJob):
    """Prompts for the same weights: kept under a name, in a folder, or neither for the base model. The answer has
    a `Sampled` or `Refused` for each."""

    kept: str | None
    folder: str | None
    shape: RunShape | None
    prompts: list[SamplePrompt]


@dataclass(frozen=True)
class TeacherJob(ServiceJob):
    """Prompts for a further base model to score. The answer has a `Sampled` or `Refused` for each."""

    teacher: str
    prompts: list[SamplePrompt]


@dataclass(frozen=True)
class Done:
    """A job is done.

    Attributes:
        answer: its answer, or `Refused`.
        peak_bytes: the most memory that rank 0 has used, on its device or, without one, on the host.
    """

    answer: Any
    peak_bytes: int


@dataclass(frozen=True)
class StopAsked:
    """Rank 0 got a signal to stop. The server then saves what there is, and asks the ranks to stop."""


@dataclass(frozen=True)
class Ready:
    """Rank 0's first message: the ranks wait for jobs.

    Attributes:
        vocab_size: number of token ids of the model.
        of_teachers: those of further base models by name.
    """

    vocab_size: int
    of_teachers: dict[str, int]
