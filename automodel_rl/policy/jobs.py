"""Jobs: what a program asks of the ranks of a policy. Every rank does every job, with its data rank's share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from automodel_rl.batch import RoutesAt
from automodel_rl.engine.parameter_groups import Settings
from automodel_rl.losses import Denominator, LossFn, Readout
from automodel_rl.optimizers import AdamWSettings
from automodel_rl.step.agreement import GlobalBatch


@dataclass(frozen=True)
class Job:
    """Work of all ranks. By itself it is none, and shows that all are there.

    Attributes:
        answered_by: "first" if rank 0's answer is everyone's, "all" if each rank's counts.
    """

    answered_by: ClassVar[Literal["first", "all"]] = "first"


@dataclass(frozen=True)
class OfFurtherModel(Job):
    """A job of a further model on the same ranks.

    Attributes:
        name: the model's name.
        job: the job.
    """

    name: str
    job: Job

    @property
    def answered_by(self) -> Literal["first", "all"]:  # type: ignore[override] # as the job says
        """Whose answers count."""
        return self.job.answered_by


@dataclass(frozen=True)
class ToHost(Job):
    """Move weights and moments to the host until `ToDevice`."""


@dataclass(frozen=True)
class ToDevice(Job):
    """Bring the weights back."""


@dataclass(frozen=True)
class Begin(Job):
    """Make the engine. The answer is None."""

    optimizer: Settings | None
    total_steps: int | None
    keep_microbatches_in: Path | None


@dataclass(frozen=True)
class TrainStep(Job):
    """`Engine.train_step`."""

    loss: LossFn
    readout: Readout
    agreed: GlobalBatch
    replay: bool = False
    place: float | None = None


@dataclass(frozen=True)
class ForwardBackward(Job):
    """`Engine.forward_backward`."""

    loss: LossFn
    readout: Readout
    agreed: GlobalBatch
    counts: dict[Denominator, int] | None
    replay: bool = False


@dataclass(frozen=True)
class OptimizerStep(Job):
    """`Engine.optimizer_step`."""

    settings: AdamWSettings | None = None


@dataclass(frozen=True)
class ZeroGrad(Job):
    """`Engine.zero_grad`."""


@dataclass(frozen=True)
class Evaluate(Job):
    """`Engine.evaluate`."""

    loss: LossFn
    readout: Readout
    agreed: GlobalBatch
    counts: dict[Denominator, int] | None


@dataclass(frozen=True)
class Logprobs(Job):
    """The log-probability of each token of each row: `RowValues`, values [n]; or of other tokens, [n, K], whose ids are
    the values of the rows with the name `ids`."""

    answered_by = "all"

    temperature: float
    agreed: GlobalBatch
    replay: bool = False
    ids: str | None = None


@dataclass(frozen=True)
class Entropies(Job):
    """The entropy of the model's distribution over each token of each row: `RowValues`, values [n]."""

    answered_by = "all"

    temperature: float
    agreed: GlobalBatch
    replay: bool = False


@dataclass(frozen=True)
class Scores(Job):
    """The outputs of a linear head for each token of each row: `RowValues`, values [n, L]."""

    answered_by = "all"

    agreed: GlobalBatch


@dataclass(frozen=True)
class TopLogits(Job):
    """The k largest logits for each token of each row, and their ids: two `RowValues`, values [n, k]. `normalised` asks
    for log-probabilities in place of logits, at a temperature."""

    answered_by = "all"

    k: int
    agreed: GlobalBatch
    normalised: bool = False
    temperature: float = 1.0


@dataclass(frozen=True)
class NextTokens(Job):
    """The likeliest token after each row: ids by row."""

    answered_by = "all"

    agreed: GlobalBatch


@dataclass(frozen=True)
class KeepWeights(Job):
    """Keep a copy of the weights that the model was loaded with."""

    name: str
    lends_memory: bool


@dataclass(frozen=True)
class UseWeights(Job):
    """Compute with kept weights until `UseWeightsBefore`."""

    name: str


@dataclass(frozen=True)
class UseChangedWeights(Job):
    """Compute with changed weights until `UseWeightsBefore`."""


@dataclass(frozen=True)
class UseRoundingNoise(Job):
    """Compute with noise as large as rounding to a dtype until `UseWeightsBefore`."""

    dtype: torch.dtype


@dataclass(frozen=True)
class UseWeightsBefore(Job):
    """Compute again as before the last `UseWeights`, `UseChangedWeights` or `UseRoundingNoise`."""


@dataclass(frozen=True)
class MoveRoutes(Job):
    """Send routes from the ranks that have them to those that train on their rows.

    Attributes:
        pieces: pieces of rows, each with the data rank that trains on the row.
    """

    pieces: list[tuple[RoutesAt, int]]


@dataclass(frozen=True)
class ForgetRoutes(Job):
    """Let go of the routes that belong to rollouts of these numbers."""

    rollouts: set[int]


@dataclass(frozen=True)
class OpenSaver(Job):
    """Prepare to write checkpoints with these texts, by the names of their files."""

    texts: dict[str, str]
    in_background: bool


@dataclass(frozen=True)
class SaveCheckpoint(Job):
    """Write a checkpoint, or begin to. Nothing else may be being written. The answer is why it cannot be, or None.

    Attributes:
        folder: its folder.
        progress: how far the program has come, with the key `step`; JSON values.
        state: the state of the program; JSON values.
    """

    folder: Path
    progress: dict[str, Any]
    state: dict[str, Any]


@dataclass(frozen=True)
class Settled:
    """What became of the checkpoint that was written last.

    Attributes:
        is_done: whether nothing is being written now.
        error: why it could not be written; told once.
        seconds: the time that it took.
    """

    is_done: bool
    error: str | None
    seconds: float


@dataclass(frozen=True)
class SettleCheckpoint(Job):
    """Look what became of the checkpoint that is being written: `Settled`.

    Attributes:
        waits: whether to wait until it is done.
    """

    waits: bool


@dataclass(frozen=True)
class NewestCheckpoint(Job):
    """The newest of these folders that is a whole checkpoint, and a warning about each newer one."""

    folders: list[Path]


@dataclass(frozen=True)
class CheckCheckpoint(Job):
    """Refuse a folder that is no whole checkpoint."""

    folder: Path


@dataclass(frozen=True)
class LoadCheckpoint(Job):
    """Go back to a checkpoint. The answer is the stored progress and the stored state of the program."""

    folder: Path


@dataclass(frozen=True)
class SaveModel(Job):
    """Write a Hugging Face checkpoint. The answer is a line about tokens that end what the model writes; "" if there is
    nothing to say."""

    folder: Path


@dataclass(frozen=True)
class KeepNotes(Job):
    """Keep the flight recorder's notes in a folder."""

    folder: Path


@dataclass(frozen=True)
class End(Job):
    """No job comes after this one.

    Attributes:
        error: what ended the program; None if it went well.
        value: what the program returned.
    """

    error: BaseException | None = None
    value: Any = None
