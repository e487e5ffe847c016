"""Jobs that rank 0 asks of all ranks for the server's."""

from dataclasses import dataclass
from pathlib import Path

from automodel_rl.losses import LossFn, Readout
from automodel_rl.policy.jobs import Job
from automodel_rl.policy.shares import RowValues
from automodel_rl.serve import messages
from automodel_rl.serve.messages import RunShape
from automodel_rl.step.agreement import GlobalBatch


@dataclass(frozen=True)
class OpenRuns(Job):
    """Prepare for runs. The engine is there."""


@dataclass(frozen=True)
class OfRuns(Job):
    """One of the server's jobs that only runs are asked to do, with its answer."""

    asked: messages.ServiceJob


@dataclass(frozen=True)
class Pass(Job):
    """A forward and backward of runs over the rows. The answers are `PassResult`s.

    Attributes:
        runs: the runs; several share no row of the adapters.
        run_of: the place among them of the run of each row.
        loss: the sum of their losses.
        readout: what it gets for every token.
        forward_only: whether nothing is trained.
        agreed: the size of the batch.
    """

    answered_by = "all"

    runs: tuple[str, ...]
    run_of: list[int]
    loss: LossFn
    readout: Readout
    forward_only: bool
    agreed: GlobalBatch


@dataclass(frozen=True)
class PassResult:
    """What a rank has of a pass.

    Attributes:
        loss: the sum of all losses, equal on all ranks.
        logprobs: log-probabilities of targets of the rows of its data rank, [n - 1] or [n - 1, K]; None on ranks that
            do not stand for a data rank.
        is_finite: whether gradients of all runs are finite, on all ranks. If not, those of no run were kept.
    """

    loss: float
    logprobs: RowValues | None
    is_finite: bool


@dataclass(frozen=True)
class Show(Job):
    """Give the model weights to compute with: kept under a name, from a folder, or those of the base model."""

    kept: str | None
    folder: Path | None
    shape: RunShape | None
