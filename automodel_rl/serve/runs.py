"""Training runs that take turns on one model, each with its own weights, gradients, moments and step count."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.engine import Engine
from automodel_rl.engine.trained_state import TrainedState, trained_parameters
from automodel_rl.errors import InputError
from automodel_rl.losses import UNDIVIDED, LinearLoss, LossFn, LossOutput, Readout, TokenOutputs
from automodel_rl.optimizers import AdamWSettings
from automodel_rl.parallel.host_collectives import any_rank, broadcast_from_last_stage
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.policy.shares import RowValues, Share
from automodel_rl.serve.adapters import Adapters
from automodel_rl.serve.all_weights import AllWeights
from automodel_rl.serve.joint_batch import gated, with_own_targets
from automodel_rl.serve.messages import RunShape
from automodel_rl.step.agreement import GlobalBatch

RUNS = "runs"
"""Name of a rank's `Runs` for remote calls."""

GONE = "the state of the run is lost: the ranks of the server exited or its weights could not be loaded"


@dataclass(frozen=True)
class Pass:
    """A forward-backward or forward-only pass of runs over rows.

    Attributes:
        runs: several if their adapters have no common row.
        run_of: index in `runs` of each row's run.
        loss: sum of their losses.
        readout: per-token outputs that it reads.
        global_batch: size of the global batch.
    """

    runs: tuple[str, ...]
    run_of: list[int]
    loss: LossFn
    readout: Readout
    forward_only: bool
    global_batch: GlobalBatch


@dataclass(frozen=True)
class PassResult:
    """One rank's result of a pass.

    Attributes:
        loss: sum of all losses, equal on all ranks.
        logprobs: log-probabilities of the targets of its data rank's rows, [n - 1] or [n - 1, K]; None on ranks that
            do not report for a data rank.
        is_finite: whether the gradients of all runs are finite, on all ranks. If not, none were kept.
    """

    loss: float
    logprobs: RowValues | None
    is_finite: bool


class Runs:
    """The runs on this rank. Methods are collectives and must be called in the same order on all ranks.

    Attributes:
        trained: the trained weights: adapters, or all weights.
        shapes: the shape of every run.
    """

    def __init__(self, engine: Engine):
        self.engine, self.handle = engine, engine.handle
        lora = self.handle.model.lora
        self.trained = AllWeights(engine) if lora is None else Adapters(engine, lora)
        self.shapes: dict[str, RunShape] = {}
        self._states: dict[str, TrainedState] = {}
        self._kept: dict[str, tuple[RunShape, TrainedState]] = {}
        self._failed_runs: set[str] = set()
        self._active: str | None = None

    def create(self, run: str, shape: RunShape) -> None:
        """Creates a run with new adapters, or with the model's initial weights."""
        self._leave()
        self.trained.begin(shape)
        self.shapes[run] = shape
        self._states[run] = self.engine.snapshot_state()

    def run_pass(self, share: Share | None, asked: Pass) -> PassResult:
        """Accumulates the gradients of the runs' losses, or only computes the losses.

        Args:
            share: the rows of this rank's data rank.
            asked: the runs and their losses.

        Raises:
            InputError: on all ranks, if a run is gone. Gradients of earlier calls are kept.
        """
        if len(asked.runs) == 1:
            self._enter(asked.runs[0])
            return self._result(asked, share, None)
        assert isinstance(self.trained, Adapters)
        self._leave()
        shapes = [self.shapes[run] for run in asked.runs]
        self.trained.join([self._states[run] for run in asked.runs])
        result = self._result(asked, share, self.trained.gate(shapes))
        split = [] if asked.forward_only else self.trained.split_gradients(shapes)
        found = [] if result.logprobs is None else [torch.from_numpy(result.logprobs.values)]
        # 0 times infinity is NaN, so an overflow in one run corrupts the others in the pass.
        if not self._are_finite([*found, *(tensor for gradients in split for tensor in gradients.values())]):
            return dataclasses.replace(result, is_finite=False)
        for run, gradients in zip(asked.runs, split, strict=False):
            self._states[run].gradients, self._states[run].has_gradients = gradients, True
        return result

    def _result(self, asked: Pass, share: Share | None, gate: Tensor | None) -> PassResult:
        found: dict[int, Tensor] = {}
        packed = [] if share is None else share.pack()
        microbatches = [gated(with_own_targets(microbatch), gate, asked.run_of) for microbatch in packed]
        work = self.engine.evaluate if asked.forward_only else self.engine.forward_backward
        total, _ = work(microbatches, recorded(asked.loss, found), asked.readout, UNDIVIDED, asked.global_batch)
        own = broadcast_from_last_stage({row: values.cpu() for row, values in found.items()}, self.handle.layout)
        stands = self.handle.layout.is_first_of_data_rank
        return PassResult(total, RowValues.of([*own], [*own.values()]) if stands else None, is_finite=True)

    def optimizer_step(self, run: str, settings: dict[str, Any]) -> dict[str, float]:
        """Takes an optimizer step and returns its metrics.

        Raises:
            InputError: on all ranks, if a forward-backward since the last step failed, which drops all gradients, or
                if weights are not finite after the step.
        """
        self._enter(run)
        if run in self._failed_runs:
            self._failed_runs.remove(run)
            self.engine.zero_grad()
            raise InputError(
                "a forward_backward before this optim_step failed: the gradients of the others are dropped, and the "
                "weights are unchanged"
            )
        shape = self.shapes[run]
        for name, parameter in self.handle.named_parameters():
            if not self.trained.is_trained(name, shape):
                parameter.grad = None
        step = self.engine.optimizer_step(AdamWSettings(**settings))
        if not step.skipped:
            self._check_weights("this optimizer step produced")
        norm = {"grad_norm:mean": step.grad_norm} if math.isfinite(step.grad_norm) else {}
        return {**norm, "skipped:max": float(step.skipped)}

    def mark_failed(self, run: str) -> None:
        """Records that a run's forward-backward failed, so that its next optimizer step fails too."""
        self._failed_runs.add(run)

    def save(self, run: str, folder: str, for_training: bool, about: dict[str, Any]) -> None:
        """Writes a run's weights and, for training, its moments.

        Raises:
            InputError: on all ranks, if the weights are not finite or cannot be written.
        """
        self._enter(run)
        self._check_weights("the run has")
        self.trained.save(Path(folder), self.shapes[run], for_training, about)

    def load(self, run: str, shape: RunShape, folder: str, with_optimizer: bool) -> None:
        """Loads a run from a folder written by `save`, creating it if necessary.

        Raises:
            InputError: the folder is damaged, or its weights are not finite. The run is then gone.
        """
        self._leave()
        self.forget((run,), ())  # a run that cannot be loaded must not continue with its old state
        self.trained.load(Path(folder), shape, with_optimizer)
        self._check_weights("the saved run has")
        self.shapes[run] = shape
        self._states[run] = self.engine.snapshot_state()

    def keep(self, run: str, name: str) -> None:
        """Keeps a copy of a run's weights for sampling. Raises InputError on all ranks if they are not finite."""
        self._enter(run)
        self._check_weights("the run has")
        state = self.engine.snapshot_state()
        self._kept[name] = (self.shapes[run], TrainedState(state.weights, {}, {}))

    def forget(self, runs: tuple[str, ...], kept: tuple[str, ...]) -> None:
        for run in runs:
            self._active = None if self._active == run else self._active
            self._states.pop(run, None)
            self.shapes.pop(run, None)
            self._failed_runs.discard(run)
        for name in kept:
            self._kept.pop(name, None)

    def show(self, kept: str | None, folder: str | None, shape: RunShape | None) -> None:
        """Loads weights for inference into the model: kept under a name, from a folder, or the base model's."""
        self._leave()
        if kept is not None:
            if kept not in self._kept:
                raise InputError(GONE)
            shape, state = self._kept[kept]
            self.trained.enter(shape)
            self.engine.restore_state(state)
        elif folder is not None:
            self.trained.load(Path(folder), shape or self.trained.whole, with_optimizer=False)
            self._check_weights("the saved run has")
        else:
            self.trained.begin(self.trained.whole)

    def _check_weights(self, what: str) -> None:
        """Raises InputError on all ranks if a trained weight is not finite. `what` is the start of the message."""
        trained = [local_tensor(parameter.detach()) for _, parameter in trained_parameters(self.handle)]
        if not self._are_finite(trained):
            raise InputError(
                f"{what} weights that are NaN or infinite: resume from weights saved earlier, with a smaller "
                "learning_rate"
            )

    def _are_finite(self, tensors: list[Tensor]) -> bool:
        """Whether all values are finite, on all ranks."""
        flags = [tensor.isfinite().all() for tensor in tensors]
        own = not flags or bool(torch.stack(flags).all())  # a stage may have no adapters
        return not any_rank([not own], self.handle.layout)[0]

    def _enter(self, run: str) -> None:
        """Loads a run's state into the model."""
        if self._active == run:
            return
        self._leave()
        if run not in self._states:
            raise InputError(GONE)
        self.trained.enter(self.shapes[run])
        self.engine.restore_state(self._states[run])
        self._active = run

    def _leave(self) -> None:
        """Saves the state of the active run from the model."""
        if self._active is not None:
            self._states[self._active] = self.engine.snapshot_state()
            self._active = None


@dataclass(frozen=True)
class _RecordedLinearLoss(LinearLoss):
    found: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        _note(self.found, outputs, microbatch)
        return super().__call__(outputs, microbatch)


def recorded(loss: LossFn, found: dict[int, Tensor]) -> LossFn:
    """Wraps a loss so that it records the log-probabilities of targets.

    Args:
        found: receives them by the sequence's index in the packed list: [n - 1], or [n - 1, K] with several targets
            per token. The last position has no target.
    """
    if isinstance(loss, LinearLoss):
        return _RecordedLinearLoss(loss.weights, loss.denominator, found)

    def record(outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        _note(found, outputs, microbatch)
        return loss(outputs, microbatch)

    return record


def _note(found: dict[int, Tensor], outputs: TokenOutputs, microbatch: Microbatch) -> None:
    if microbatch.is_empty:
        return
    logprobs = outputs.logprobs if outputs.ids_logprobs is None else outputs.ids_logprobs
    pieces = logprobs.detach().split(microbatch.lengths)
    for place, piece in zip(microbatch.order, pieces, strict=True):
        found[place] = piece[:-1]
