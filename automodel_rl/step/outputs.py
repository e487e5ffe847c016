"""Uses of the last stage's results: a loss divided by global counts, or outputs that are kept.

Sums are divided by global counts only here, except for the routers' auxiliary loss, which `mixture/routers.py`
divides by the global number of tokens.
"""

import functools
import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch, Microbatch
from automodel_rl.errors import MicrobatchError, root_cause
from automodel_rl.launch.flight import in_microbatch
from automodel_rl.losses import Denominator, LinearLoss, LossFn, LossOutput, Readout, TokenOutputs
from automodel_rl.model.head import OutputFn
from automodel_rl.parallel.collectives import AllGatherCP
from automodel_rl.step.totals import LossTotals


class PPLossAdapter:
    """Runs a loss on every microbatch and returns the scalar to differentiate: each sum divided by its global count.
    Also used without a pipeline; the name (PP: pipeline parallelism) is the reference design's.

    A loss that has raised is not called again, and the schedule continues with 0 in its place: if it stopped, other
    stages and data ranks would hang. `StepRunner` raises `failure` after the schedule.

    Args:
        counts: global denominators, over all data ranks.
        readout: the per-token values that the loss needs.

    Attributes:
        totals: undivided sums and metrics so far, on the rank with the last stage.
        failure: the first failure of a loss.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        microbatches: Sequence[Microbatch],
        counts: dict[Denominator, int],
        readout: Readout,
        stage: int = 0,
    ):
        self.loss_fn, self.microbatches, self.counts = loss_fn, microbatches, counts
        self.readout, self.stage = readout, stage
        self.totals = LossTotals()
        self.failure: MicrobatchError | None = None

    def __call__(self, columns: Tensor, index: int) -> Tensor:
        """Returns the loss of microbatch `index` from its readout, `columns` [T, K]."""
        if self.failure is None:
            try:
                with in_microbatch("loss", self.stage, index):
                    return self._loss(TokenOutputs.from_columns(columns, self.readout), self.microbatches[index])
            except MicrobatchError as failure:
                traceback.clear_frames(root_cause(failure).__traceback__)  # frees the loss's tensors
                self.failure = failure
        return (columns * 0).sum()

    def gradient_known_before(self, microbatch: Microbatch, index: int) -> Tensor | None:
        """Returns the derivative of the loss by a microbatch's log-probabilities, float64 [T] or [T, K]; None if it
        depends on the model. A failure is recorded like one of the loss, with zeros returned."""
        if not isinstance(self.loss_fn, LinearLoss):
            return None
        if self.failure is None:
            try:
                with in_microbatch("loss", self.stage, index):
                    return self.loss_fn.gradient(microbatch, self.counts, self.readout)
            except MicrobatchError as failure:
                self.failure = failure
        return torch.zeros(microbatch.num_tokens, dtype=torch.float64)

    def _loss(self, outputs: TokenOutputs, microbatch: Microbatch) -> Tensor:
        output = self.loss_fn(outputs, microbatch)
        if not isinstance(output, LossOutput):
            raise TypeError(
                f"the loss returned a {type(output).__name__}: return a LossOutput, as in "
                f"LossOutput(sums={{'tokens': total}}){_place(self.loss_fn)}"
            )
        unknown = [name for name in output.sums if name not in self.counts]
        if unknown or not output.sums:
            given = repr(unknown[0]) if unknown else "nothing"
            raise ValueError(
                f"the loss returned sums over {given}: name what divides them, "
                f"{', '.join(self.counts)}{_place(self.loss_fn)}"
            )
        # A global batch may have a count of 0; its sums are then 0.
        everything = (*output.sums.items(), *output.auxiliary.items())
        loss = torch.stack([total / max(self.counts[name], 1) for name, total in everything]).sum()
        self.totals.add(output)
        return loss

    @property
    def targets(self) -> list[Callable[[Tensor], Tensor]]:
        """A schedule's targets: for each microbatch the function from its columns to its loss."""
        return [functools.partial(self.__call__, index=index) for index in range(len(self.microbatches))]


def _place(function: Any) -> str:
    """Returns where a Python function is defined, as ` (file:line)`; else ""."""
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isfunction(function):
        return ""
    return f" ({function.__code__.co_filename}:{function.__code__.co_firstlineno})"


class LogitsCapturer:
    """Keeps the results of an output function in a forward-only step, on the rank with the last stage. They need not
    be logits; the name is the reference design's. `output_fn` computes in chunks, to avoid materialising [T, V]."""

    def __init__(self, output_fn: OutputFn):
        self.output_fn = output_fn
        self.outputs: list[Tensor] = []

    def __call__(self, hidden: Tensor, head: Any, microbatch: LocalMicrobatch) -> Tensor:
        output = self.output_fn(hidden, head, microbatch)
        self.outputs.append(output)
        return output.new_zeros((), dtype=torch.float32)  # the schedule needs a tensor, which is not read


def whole_microbatches(output_fn: OutputFn, cp_group: dist.ProcessGroup | None) -> OutputFn:
    """Makes an output function return results for the whole microbatch, [T, ...], on every cp rank.

    Results are in the microbatch's order, without pads. Losses thus see whole sequences, and all cp ranks compute the
    same losses (hence "slice" in the backward).
    """

    def whole(hidden: Tensor, head: Any, microbatch: LocalMicrobatch) -> Tensor:
        output = output_fn(hidden, head, microbatch)
        if microbatch.restore is None:
            return output
        if cp_group is not None:
            output = AllGatherCP.apply(output, cp_group, "slice")
        return output.index_select(0, microbatch.restore)

    return whole
