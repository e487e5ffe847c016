"""Training runs that share one model: each has adapters, gradients, moments and steps of its own, and its turns."""

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
from automodel_rl.parallel.host_collectives import any_rank, from_last_stage
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.policy.shares import RowValues, Share
from automodel_rl.serve.adapters import Adapters
from automodel_rl.serve.all_weights import AllWeights
from automodel_rl.serve.joint_batch import gated, with_own_targets
from automodel_rl.serve.messages import RunShape
from automodel_rl.step.agreement import GlobalBatch

RUNS = "runs"
"""The name of a rank's `Runs`, for remote calls."""

GONE = "the state of the run is gone, for the ranks of the server ended or its weights could not be loaded"


@dataclass(frozen=True)
class Pass:
    """A forward and backward of runs over the rows.

    Attributes:
        runs: the runs; several share no row of the adapters.
        run_of: the place among them of the run of each row.
        loss: the sum of their losses.
        readout: what it gets for every token.
        forward_only: whether nothing is trained.
        agreed: the size of the batch.
    """

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


class Runs:
    """The runs on this rank. Methods are collectives of all ranks, which call them in the same order.

    Args:
        engine: trains the model.

    Attributes:
        trained: what runs train: adapters, or all weights.
        shapes: the shape of every run.
    """

    def __init__(self, engine: Engine):
        self.engine, self.handle = engine, engine.handle
        lora = self.handle.model.lora
        self.trained = AllWeights(engine) if lora is None else Adapters(engine, lora)
        self.shapes: dict[str, RunShape] = {}
        self._states: dict[str, TrainedState] = {}
        self._kept: dict[str, tuple[RunShape, TrainedState]] = {}
        self._spoilt: set[str] = set()
        self._active: str | None = None

    def create(self, run: str, shape: RunShape) -> None:
        """Makes a run with new adapters, or with the model's first weights."""
        self._leave()
        self.trained.begin(shape)
        self.shapes[run] = shape
        self._states[run] = self.engine.take_state()

    def run_pass(self, share: Share | None, asked: Pass) -> PassResult:
        """Adds up the gradients of the losses of runs, or computes the losses alone.

        Args:
            share: the rows of this rank's data rank.
            asked: the runs and their losses.

        Raises:
            InputError: on all ranks; a run is gone. Gradients of earlier calls are still there.
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
        # A product of 0 and infinity is NaN, so what overflows in one run spoils the others in the same pass.
        if not self._are_finite([*found, *(tensor for gradients in split for tensor in gradients.values())]):
            return dataclasses.replace(result, is_finite=False)
        for run, gradients in zip(asked.runs, split, strict=False):
            self._states[run].gradients, self._states[run].has_gradients = gradients, True
        return result

    def _result(self, asked: Pass, share: Share | None, gate: Tensor | None) -> PassResult:
        """The result of a pass, for which the model has its weights."""
        found: dict[int, Tensor] = {}
        packed = [] if share is None else share.pack()
        microbatches = [gated(with_own_targets(microbatch), gate, asked.run_of) for microbatch in packed]
        work = self.engine.evaluate if asked.forward_only else self.engine.forward_backward
        total, _ = work(microbatches, recorded(asked.loss, found), asked.readout, UNDIVIDED, asked.agreed)
        own = from_last_stage({row: values.cpu() for row, values in found.items()}, self.handle.layout)
        stands = self.handle.layout.is_first_of_data_rank
        return PassResult(total, RowValues.of([*own], [*own.values()]) if stands else None, is_finite=True)

    def optimizer_step(self, run: str, settings: dict[str, Any]) -> dict[str, float]:
        """Takes an optimizer step and gives its metrics.

        Raises:
            InputError: on all ranks; a forward and backward since the last step failed, and all gradients are dropped.
                Or weights are not finite after the step.
        """
        self._enter(run)
        if run in self._spoilt:
            self._spoilt.remove(run)
            self.engine.zero_grad()
            raise InputError(
                "a forward_backward before this optim_step failed: the gradients of the others are dropped, and the "
                "weights are as before"
            )
        shape = self.shapes[run]
        for name, parameter in self.handle.named_parameters():
            if not self.trained.is_trained(name, shape):
                parameter.grad = None
        step = self.engine.optimizer_step(AdamWSettings(**settings))
        if not step.skipped:
            self._check_weights("this optimizer step has made")
        norm = {"grad_norm:mean": step.grad_norm} if math.isfinite(step.grad_norm) else {}
        return {**norm, "skipped:max": float(step.skipped)}

    def spoil(self, run: str) -> None:
        """Notes that a forward and backward of a run failed: its next optimizer step must fail, too."""
        self._spoilt.add(run)

    def save(self, run: str, folder: str, for_training: bool, about: dict[str, Any]) -> None:
        """Writes a run's weights and, for training, its moments.

        Raises:
            InputError: on all ranks; they are not finite, or cannot be written.
        """
        self._enter(run)
        self._check_weights("the run has")
        self.trained.save(Path(folder), self.shapes[run], for_training, about)

    def load(self, run: str, shape: RunShape, folder: str, with_optimizer: bool) -> None:
        """Makes a run go on from a folder that `save` wrote. It is made if there is none.

        Raises:
            InputError: the folder is damaged, or its weights are not finite. The run is then gone.
        """
        self._leave()
        self.forget((run,), ())  # a run that cannot be loaded must not go on as it was
        self.trained.load(Path(folder), shape, with_optimizer)
        self._check_weights("the saved weights have")
        self.shapes[run] = shape
        self._states[run] = self.engine.take_state()

    def keep(self, run: str, name: str) -> None:
        """Keeps a copy of a run's weights.

        Raises:
            InputError: on all ranks; they are not finite.
        """
        self._enter(run)
        self._check_weights("the run has")
        state = self.engine.take_state()
        self._kept[name] = (self.shapes[run], TrainedState(state.weights, {}, {}))

    def forget(self, runs: tuple[str, ...], kept: tuple[str, ...]) -> None:
        """Lets go of runs and kept weights."""
        for run in runs:
            self._active = None if self._active == run else self._active
            self._states.pop(run, None)
            self.shapes.pop(run, None)
            self._spoilt.discard(run)
        for name in kept:
            self._kept.pop(name, None)

    def show(self, kept: str | None, folder: str | None, shape: RunShape | None) -> None:
        """Gives the model weights to compute with: kept under a name, from a folder, or those of the base model."""
        self._leave()
        if kept is not None:
            if kept not in self._kept:
                raise InputError(GONE)
            shape, state = self._kept[kept]
            self.trained.enter(shape)
            self.engine.put_state(state)
        elif folder is not None:
            self.trained.load(Path(folder), shape or self.trained.whole, with_optimizer=False)
            self._check_weights("the saved weights have")
        else:
            self.trained.begin(self.trained.whole)

    def _check_weights(self, what: str) -> None:
        """Raises InputError on all ranks if a trained weight of the model is not finite; `what` begins its text."""
        trained = [local_tensor(parameter.detach()) for _, parameter in trained_parameters(self.handle)]
        if not self._are_finite(trained):
            raise InputError(
                f"{what} weights that are NaN or infinite: go on from weights that were saved before, with a smaller "
                "learning_rate"
            )

    def _are_finite(self, tensors: list[Tensor]) -> bool:
        """Whether all values are finite, on all ranks."""
        flags = [tensor.isfinite().all() for tensor in tensors]
        own = not flags or bool(torch.stack(flags).all())  # a stage may have no adapter
        return not any_rank([not own], self.handle.layout)[0]

    def _enter(self, run: str) -> None:
        """Gives the model the state of a run."""
        if self._active == run:
            return
        self._leave()
        if run not in self._states:
            raise InputError(GONE)
        self.trained.enter(self.shapes[run])
        self.engine.put_state(self._states[run])
        self._active = run

    def _leave(self) -> None:
        """Takes the state of the run that was last out of the model."""
        if self._active is not None:
            self._states[self._active] = self.engine.take_state()
            self._active = None


@dataclass(frozen=True)
class _RecordedLinearLoss(LinearLoss):
    found: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        _note(self.found, outputs, microbatch)
        return super().__call__(outputs, microbatch)


def recorded(loss: LossFn, found: dict[int, Tensor]) -> LossFn:
    """The same loss, which notes the log-probabilities of targets.

    Args:
        loss: the loss.
        found: gets them by the sequence's place in the list that was packed: [n - 1], or [n - 1, K] where several are
            read for each, without those of the last position, which has no target.
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
    logprobs = outputs.logprobs if outputs.at is None else outputs.at
    pieces = logprobs.detach().split(microbatch.lengths)
    for place, piece in zip(microbatch.order, pieces, strict=True):
        found[place] = piece[:-1]
