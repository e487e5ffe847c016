"""Drivers run a list of microbatches, sequentially or through a pipeline schedule."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.batch.tensors import MTP_TARGETS
from automodel_rl.compat.pipelining import PackedStage, Schedule, StageGroups, run_schedule
from automodel_rl.config import ParallelConfig
from automodel_rl.launch.flight import in_microbatch
from automodel_rl.model.head import OutputFn
from automodel_rl.model.part_forward import num_carried
from automodel_rl.model.split import Stage
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.pipeline.schedules import fill_up_to
from automodel_rl.parallel.sharding import begin_backward
from automodel_rl.step.outputs import LogitsCapturer, PPLossAdapter


class Driver(Protocol):
    """Runs microbatches through this rank's parts. A part is called as `part(input, microbatch=microbatch,
    output_fn=f)`."""

    def fill_up_to(self, num_microbatches: int) -> int:
        """Returns the smallest number of microbatches, at least the given one, that it can run."""
        ...

    def forward_backward(
        self, microbatches: Sequence[LocalMicrobatch], adapter: PPLossAdapter, output_fn: OutputFn
    ) -> None:
        """Runs forward, loss and backward of every microbatch. The adapter receives the results of `output_fn`."""
        ...

    def forward(self, microbatches: Sequence[LocalMicrobatch], capturer: LogitsCapturer) -> None:
        """Runs the forward of every microbatch, without gradients."""
        ...


class SequentialDriver:
    """Runs an unsplit model, one microbatch after the other. `parallel` determines when gradients are reduced."""

    def __init__(self, part: Any, parallel: ParallelConfig):
        self.part = part
        self._begin_backward = _begin_backward(part, parallel)

    def fill_up_to(self, num_microbatches: int) -> int:
        return num_microbatches

    def forward_backward(
        self, microbatches: Sequence[LocalMicrobatch], adapter: PPLossAdapter, output_fn: OutputFn
    ) -> None:
        for index, microbatch in enumerate(microbatches):
            self._begin_backward(index == len(microbatches) - 1)
            loss = adapter(self._forward(microbatch, output_fn, index), index)
            with in_microbatch("backward", 0, index):
                loss.backward()

    @torch.no_grad()
    def forward(self, microbatches: Sequence[LocalMicrobatch], capturer: LogitsCapturer) -> None:
        for index, microbatch in enumerate(microbatches):
            self._forward(microbatch, capturer, index)

    def _forward(self, microbatch: LocalMicrobatch, output_fn: OutputFn, index: int) -> Tensor:
        with in_microbatch("forward", 0, index):
            return self.part(microbatch.input_ids[None], microbatch=microbatch, output_fn=output_fn)


def _begin_backward(part: Any, parallel: ParallelConfig) -> Callable[[bool], None]:
    """Returns the function to call before each of a part's backwards, with whether it is the step's last."""
    return functools.partial(begin_backward, part, reduces=parallel.reduces_each, reshards=parallel.reshards)


class PipelineDriver:
    """Runs this rank's stages by torch's schedules, with a different number of tokens in every microbatch.

    Args:
        hidden_size: H of the activations [1, t, H] sent between stages.
        num_deepstack: number of first layers after which image features are added. Features for later stages are sent
            as additional rows of the activations (model/part_forward.py).
    """

    def __init__(
        self, stages: Sequence[Stage], layout: Layout, hidden_size: int, dtype: torch.dtype, num_deepstack: int = 0
    ):
        self.parallel = layout.parallel
        self._carried = [
            [num_carried(stage.part, num_deepstack, before=before) for before in (True, False)] for stage in stages
        ]
        self.schedule_class = get_schedule_class(layout.parallel.schedule)
        self.hidden_size, self.dtype = hidden_size, dtype
        self._schedules: dict[int, Schedule] = {}
        # Under sequence parallelism each tp rank sends its share of the tokens.
        self.boundary_ranks = layout.parallel.tp if layout.parallel.sequence_parallel else 1
        groups = StageGroups(layout.device, layout.pp_group, layout.message_groups)
        num_stages = layout.parallel.num_stages
        self.stages = [
            PackedStage(
                stage.part,
                stage.index,
                num_stages,
                groups,
                _begin_backward(stage.part, self.parallel) if self.parallel.reduces_each else None,
            )
            for stage in stages
        ]

    def fill_up_to(self, num_microbatches: int) -> int:
        return fill_up_to(num_microbatches, self.parallel)

    def forward_backward(
        self, microbatches: Sequence[LocalMicrobatch], adapter: PPLossAdapter, output_fn: OutputFn
    ) -> None:
        self._run(microbatches, output_fn, adapter.targets)

    def forward(self, microbatches: Sequence[LocalMicrobatch], capturer: LogitsCapturer) -> None:
        self._run(microbatches, capturer, None)

    def _run(self, microbatches: Sequence[LocalMicrobatch], output_fn: OutputFn, targets: Any) -> None:
        run_schedule(
            self._schedule(len(microbatches)),
            shapes=[
                [(self._shape(microbatch, before), self._shape(microbatch, after)) for microbatch in microbatches]
                for before, after in self._carried
            ],
            dtype=self.dtype,
            inputs=[microbatch.input_ids[None] for microbatch in microbatches],
            keywords=[{"microbatch": microbatch, "output_fn": output_fn} for microbatch in microbatches],
            targets=targets,
        )

    def _shape(self, microbatch: LocalMicrobatch, carried: int) -> tuple[int, ...]:
        """Returns the shape of a microbatch's activations, with `carried` features per image token or with embeddings
        of next tokens."""
        rows = microbatch.num_tokens // self.boundary_ranks
        rows += rows if MTP_TARGETS in microbatch.tokens else carried * len(microbatch.media.places)
        return (1, rows, self.hidden_size)

    def _schedule(self, num_microbatches: int) -> Schedule:
        if num_microbatches not in self._schedules:
            stages = self.stages[0] if issubclass(self.schedule_class, PipelineScheduleSingle) else self.stages
            self._schedules[num_microbatches] = self.schedule_class(
                stages, num_microbatches, loss_fn=lambda output, target: target(output), scale_grads=False
            )
        return self._schedules[num_microbatches]
