"""Stock pipeline schedules over microbatches of different token counts, by private names of torch's pipelining.

torch's stages infer one activation shape from the first microbatch. Here every rank already knows how many tokens each
microbatch has, so receive buffers are made per microbatch and inference never runs: no padding, no extra forward, and
no state left over between training and forward-only steps.

Checked with torch 2.11.0 and 2.13.0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from automodel_rl.compat.versions import TORCH
from automodel_rl.launch.flight import in_microbatch

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
Shape = tuple[int, ...]

# torch 2.12 gave receive buffers a second description of their tensor and stages a `_stage_meta`.
HAS_TENSOR_META = TORCH >= (2, 12)


@dataclass(frozen=True)
class StageGroups:
    """Where a pipeline's stages compute, and the groups that their messages use.

    Attributes:
        device: of this rank.
        pipeline: the pipeline ranks.
        messages: groups by kind of message and parity of the sender's rank; empty where `pipeline` carries them all.
    """

    device: torch.device
    pipeline: dist.ProcessGroup
    messages: dict[tuple[str, int], dist.ProcessGroup]


class PackedStage(PipelineStage):
    """A stage whose receive buffers follow the token count of every microbatch.

    Args:
        part: the stage's layers.
        index, num_stages: its place.
        groups: of the pipeline.
    """

    def __init__(self, part: nn.Module, index: int, num_stages: int, groups: StageGroups):
        super().__init__(part, index, num_stages, groups.device, group=groups.pipeline)
        self.message_groups = groups.messages

    def bind(self, shapes: Sequence[Shape], dtype: torch.dtype, train: bool) -> None:
        """Prepares one step.

        Args:
            shapes: boundary activation of every microbatch, e.g. (1, T_i, H).
            dtype: of the boundary activations.
            train: False for a forward-only step.
        """
        self.has_backward = train
        self.clear_runtime_states()
        self.bwd_cache.clear()
        self.chunks = len(shapes)
        self.act_send_info = {0: [] if self.is_last else [self.stage_index + 1]}
        self.grad_send_info = None
        before, after = self.stage_index - 1, self.stage_index + 1
        self.args_recv_info = {
            i: () if self.is_first else (self._receive("activation", before, shape, dtype, train),)
            for i, shape in enumerate(shapes)
        }
        self.grad_recv_info = {
            i: () if self.is_last or not train else (self._receive("gradient", after, shape, dtype, False),)
            for i, shape in enumerate(shapes)
        }
        if HAS_TENSOR_META:
            like = () if self.is_first else (_tensor_meta(shapes[0], dtype, train),)
            self._stage_meta.inputs = self._stage_meta.input_grads = like

    def release(self) -> None:
        """Lets go of a step's activations and receive buffers, which would else live until the next one."""
        self.clear_runtime_states()
        self.args_recv_info, self.grad_recv_info = {}, {}

    def _receive(self, name: str, source: int, shape: Shape, dtype: torch.dtype, requires_grad: bool) -> Any:
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        if HAS_TENSOR_META:
            return torch_stage._RecvInfo(name, source, buffer, _tensor_meta(shape, dtype, requires_grad))
        return torch_stage._RecvInfo(name, source, buffer.requires_grad_(requires_grad))  # type: ignore[call-arg]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._regroup(super().get_fwd_recv_ops(fwd_chunk_id), "activation", self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._regroup(super().get_fwd_send_ops(fwd_chunk_id), "activation", self.stage_index)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._regroup(super().get_bwd_recv_ops(bwd_chunk_id), "gradient", self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._regroup(super().get_bwd_send_ops(bwd_chunk_id), "gradient", self.stage_index)

    def _regroup(self, ops: list[dist.P2POp], message: str, sender: int) -> list[dist.P2POp]:
        """Moves messages to the group of their kind and sending stage, where there is one."""
        if self.message_groups:
            for op in ops:
                op.group = self.message_groups[message, self.stage_index_to_group_rank[sender] % 2]
        return ops

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with in_microbatch("forward", self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        # torch 2.11 takes every input for a tensor when it splits a backward, and our keywords are none.
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        self.fwd_cache[fwd_chunk_id] = (outputs, [value for value in inputs if isinstance(value, Tensor)])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with in_microbatch("backward", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with in_microbatch("weight backward", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # The stock forward-only step reduces and rescales the gradients that are there.
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    # The stock checks compare every microbatch with the shape of the first one.
    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None: ...
    def _validate_fwd_outputs(self, outputs: Any) -> None: ...
    def _validate_stage_tensors(self, *args: Any, **kwargs: Any) -> None: ...


def run_schedule(
    schedule: Schedule,
    shapes: Sequence[Shape],
    dtype: torch.dtype,
    inputs: Sequence[Tensor],
    keywords: Sequence[dict[str, Any]],
    targets: list[Callable[[Any], Tensor]] | None,
) -> None:
    """Runs one step over pre-split microbatches; with `targets` forward and backward, without them forward only.

    Args:
        schedule: built with a loss function that calls its target with the last stage's output.
        shapes: boundary activation of every microbatch.
        dtype: of the boundary activations.
        inputs: first stage's input of every microbatch; the other stages ignore it.
        keywords: keyword arguments of every stage's forward, for every microbatch.
        targets: for every microbatch a function from the last stage's output to its loss.
    """
    train = targets is not None
    stages = stages_of(schedule)
    for stage in stages:
        stage.bind(shapes, dtype, train)
    name = "_stage" if isinstance(schedule, PipelineScheduleSingle) else "_stages"
    setattr(schedule, f"{name}_forward_initialized", True)  # its own shape inference must not run
    setattr(schedule, f"{name}_backward_initialized", train)
    kept: dict[str, Any] = {"_has_backward": schedule._has_backward, "_loss_fn": schedule._loss_fn}
    schedule._has_backward = train
    if not train:
        schedule._loss_fn = None
        if isinstance(schedule, _PipelineScheduleRuntime):
            kept["pipeline_order_with_comms"] = schedule.pipeline_order_with_comms
            schedule.pipeline_order_with_comms = _forward_actions(schedule)
    losses: list[Tensor] | None = [] if train else None
    try:
        with torch.set_grad_enabled(train):
            schedule._step_microbatches(
                [(tensor,) for tensor in inputs], list(keywords), targets, losses, return_outputs=False
            )
    finally:
        for attribute, value in kept.items():
            setattr(schedule, attribute, value)
        for stage in stages:
            stage.release()


def stages_of(schedule: Schedule) -> list[Any]:
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages


def _forward_actions(schedule: _PipelineScheduleRuntime) -> dict[int, list[Any]]:
    """The forward part of a schedule's plan, with every stage's weights gathered from its first to its last forward.

    The stock forward-only step cannot run plans with V placement, and gathers weights where a backward would need them.
    """
    plan = schedule.pipeline_order_with_comms[schedule.rank]
    flat = [sub for action in plan for sub in (action.sub_actions or (action,))]
    kinds = {kind: [a for a in flat if a.computation_type.name == kind] for kind in ("UNSHARD", "RESHARD", "FORWARD")}
    gather, release = ({a.stage_index: a for a in kinds[kind]} for kind in ("UNSHARD", "RESHARD"))
    first: dict[int, Any] = {}
    last: dict[int, Any] = {}
    for action in kinds["FORWARD"]:
        first.setdefault(action.stage_index, action)
        last[action.stage_index] = action
    actions = []
    for action in flat:
        if action.computation_type.name in ("SEND_F", "RECV_F"):
            actions.append(action)
        elif action.computation_type.name == "FORWARD":
            stage = action.stage_index
            actions += (
                [gather[stage]] * (action is first[stage]) + [action] + [release[stage]] * (action is last[stage])
            )
    return {schedule.rank: actions}


def _tensor_meta(shape: Shape, dtype: torch.dtype, requires_grad: bool) -> Any:
    from torch.distributed.pipelining._utils import extract_tensor_meta  # not in torch 2.11

    return extract_tensor_meta(torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad))


def planned_actions(name: str, pp: int, stages_of_rank: Sequence[Sequence[int]], num_microbatches: int) -> list[list]:
    """What each rank does in one step of a stock schedule, without process groups: for planning.

    Args:
        name: of the schedule.
        pp: pipeline ranks.
        stages_of_rank: for every rank the stages it has.
        num_microbatches: that the schedule runs.

    Returns:
        For every rank its actions in order, as (stage, kind, microbatch); kinds are F, B (whole backward), I (of the
        inputs) and W (of the weights).
    """
    schedule_class: Any = get_schedule_class(name)
    if issubclass(schedule_class, PipelineScheduleSingle):  # these publish no plan that can be relied on
        ahead = [num_microbatches if name == "GPipe" else pp - rank for rank in range(pp)]
        return [_forward_ahead(rank, min(ahead[rank], num_microbatches), num_microbatches) for rank in range(pp)]
    stages = [_StageStandIn(index, sum(map(len, stages_of_rank)), pp) for index in stages_of_rank[0]]
    orders = schedule_class(stages, num_microbatches, loss_fn=_no_loss).pipeline_order
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [
            (sub.stage_index, kinds[sub.computation_type.name], sub.microbatch_index)
            for action in orders[rank]
            if action is not None
            for sub in (action.sub_actions or (action,))
            if sub.computation_type.name in kinds
        ]
        for rank in range(pp)
    ]


def _forward_ahead(stage: int, ahead: int, num_microbatches: int) -> list[tuple[int, str, int]]:
    """`ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    actions = [(stage, "F", index) for index in range(ahead)]
    for index in range(num_microbatches):
        actions.append((stage, "B", index))
        if ahead + index < num_microbatches:
            actions.append((stage, "F", ahead + index))
    return actions


class _StageStandIn:
    """The attributes of rank 0's stages that schedules read when they make their plan."""

    def __init__(self, index: int, num_stages: int, pp: int):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, num_stages, pp, 0
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.has_backward, self.submod, self.device = True, None, torch.device("cpu")


def _no_loss(*_: object) -> None:
    raise AssertionError("a plan computes nothing")
