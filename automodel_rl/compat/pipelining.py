"""torch's pipeline schedules over microbatches with different numbers of tokens, and their receive buffers.

torch's stages infer one activation shape from the first microbatch. Here every rank already knows each microbatch's
number of tokens, so each gets its own receive buffers and shapes are never inferred: no padding, no extra forward,
and no state left over between training and forward-only steps. A buffer exists from the request of its message until
it has been used, so memory depends only on the microbatches in flight.

Checked with torch 2.11, 2.13 and 2.15.
"""

import functools
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
Boundaries = tuple[Shape, Shape]
"""Shapes of a microbatch's activations before and after a stage, e.g. (1, T_i, H). A stage at an end ignores one."""

HAS_TENSOR_META = TORCH >= (2, 12)
"""Whether receive buffers describe their tensor a second time and stages have a `_stage_meta`, as since torch 2.12."""

ALLOCATES = TORCH >= (2, 15)
"""Whether torch itself allocates a receive buffer when its message is requested and frees what has been sent, as
since torch 2.15."""


@dataclass(frozen=True)
class StageGroups:
    """The device and process groups of this rank's stages.

    Attributes:
        messages: groups by kind of message ("activation" or "gradient") and parity of the sender's rank; empty if
            `pipeline` carries all messages.
    """

    device: torch.device
    pipeline: dist.ProcessGroup
    messages: dict[tuple[str, int], dist.ProcessGroup]


class _Buffers(dict[int, Any]):
    """Receive buffers by microbatch, created on first access."""

    def __init__(self, make: Callable[[int], Any]):
        super().__init__()
        self._make = make

    def __missing__(self, index: int) -> Any:
        self[index] = self._make(index)
        return self[index]


class _Plain(nn.Module):
    """Hides a part's FSDP module from torch's stages, which would gather all of its layers at once and reduce
    gradients only at the end of a step."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.part(*args, **kwargs)


class PackedStage(PipelineStage):
    """A stage with receive buffers for each microbatch in flight, sized by its number of tokens.

    Args:
        begin_backward: called before each backward, with whether it is the step's last, if the part gathers weights
            and reduces gradients by itself; None if torch's schedule controls that.
    """

    def __init__(
        self,
        part: nn.Module,
        index: int,
        num_stages: int,
        groups: StageGroups,
        begin_backward: Callable[[bool], None] | None = None,
    ):
        submodule = part if begin_backward is None else _Plain(part)
        super().__init__(submodule, index, num_stages, groups.device, group=groups.pipeline)
        self.message_groups, self.begin_backward = groups.messages, begin_backward

    def bind(self, shapes: Sequence[Boundaries], dtype: torch.dtype, train: bool) -> None:
        """Prepares one step."""
        self.has_backward = train
        self.clear_runtime_states()
        self.bwd_cache.clear()
        self.chunks = len(shapes)
        self.act_send_info = {0: [] if self.is_last else [self.stage_index + 1]}
        before, after = self.stage_index - 1, self.stage_index + 1
        self.grad_send_info = [] if self.is_first else [before]
        self.args_recv_info = _Buffers(
            lambda i: () if self.is_first else (self._receive("activation", before, shapes[i][0], dtype, train),)
        )
        self.grad_recv_info = _Buffers(
            lambda i: (
                () if self.is_last or not train else (self._receive("gradient", after, shapes[i][1], dtype, False),)
            )
        )
        if HAS_TENSOR_META:
            like = () if self.is_first else (_tensor_meta(shapes[0][0], dtype, train),)
            self._stage_meta.inputs = self._stage_meta.input_grads = like

    def release(self) -> None:
        """Frees a step's activations and receive buffers, which would otherwise stay until the next step."""
        self.clear_runtime_states()
        self.args_recv_info, self.grad_recv_info = {}, {}

    def _receive(self, name: str, source: int, shape: Shape, dtype: torch.dtype, requires_grad: bool) -> Any:
        if ALLOCATES:
            return torch_stage._RecvInfo(name, source, _tensor_meta(shape, dtype, requires_grad))  # type: ignore[call-arg]
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        if HAS_TENSOR_META:
            return torch_stage._RecvInfo(name, source, buffer, _tensor_meta(shape, dtype, requires_grad))
        return torch_stage._RecvInfo(name, source, buffer.requires_grad_(requires_grad))  # type: ignore[call-arg]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._regroup(super().get_fwd_recv_ops(fwd_chunk_id), "activation", self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        for op in ops:
            op.tensor = op.tensor.detach()  # torch 2.11 keeps sends during the step, and their graphs hold inputs
        return self._regroup(ops, "activation", self.stage_index)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._regroup(super().get_bwd_recv_ops(bwd_chunk_id), "gradient", self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._regroup(super().get_bwd_send_ops(bwd_chunk_id), "gradient", self.stage_index)

    def _regroup(self, ops: list[dist.P2POp], message: str, sender: int) -> list[dist.P2POp]:
        """Moves messages to the group of their kind and sender, if there are such groups."""
        if self.message_groups:
            for op in ops:
                op.group = self.message_groups[message, self.stage_index_to_group_rank[sender] % 2]
        return ops

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with in_microbatch("forward", self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not ALLOCATES:
            # torch 2.11 expects only tensors here when it splits a backward, but keyword arguments are not tensors.
            outputs, inputs = self.fwd_cache[fwd_chunk_id]
            self.fwd_cache[fwd_chunk_id] = (outputs, [value for value in inputs if isinstance(value, Tensor)])
        self.args_recv_info.pop(fwd_chunk_id, None)  # the cache holds what the backward needs
        self.output_chunks.clear()  # not needed, and their graphs would hold the inputs
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **keywords: Any) -> Any:
        if self.begin_backward is not None:
            self.begin_backward(keywords["last_backward"])
        with in_microbatch("backward", self.stage_index, bwd_chunk_id):
            result = super().backward_one_chunk(bwd_chunk_id, *args, **keywords)
        self.grad_recv_info.pop(bwd_chunk_id, None)
        loss = keywords.get("loss")
        if loss is not None and not loss._is_view():
            loss.detach_()  # torch keeps all losses of a step, and their graphs would hold the inputs
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with in_microbatch("weight backward", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # torch's forward-only step would reduce and rescale the previous step's gradients.
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    # torch's checks compare every microbatch with the shape of the first one.
    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None: ...
    def _validate_fwd_outputs(self, outputs: Any) -> None: ...
    def _validate_stage_tensors(self, *args: Any, **kwargs: Any) -> None: ...


def run_schedule(
    schedule: Schedule,
    shapes: Sequence[Sequence[Boundaries]],
    dtype: torch.dtype,
    inputs: Sequence[Tensor],
    keywords: Sequence[dict[str, Any]],
    targets: list[Callable[[Any], Tensor]] | None,
) -> None:
    """Runs one step over microbatches: forward and backward with `targets`, forward only without.

    Args:
        schedule: a schedule whose loss function calls its target with the last stage's output.
        shapes: for each of this rank's stages, the shapes of every microbatch's activations before and after it.
        inputs: the first stage's input for every microbatch; other stages ignore it.
        keywords: keyword arguments of each stage's forward, for every microbatch.
        targets: for every microbatch, a function from the last stage's output to the loss.
    """
    train = targets is not None
    stages = stages_of(schedule)
    for stage, of_stage in zip(stages, shapes, strict=True):
        stage.bind(of_stage, dtype, train)
    name = "_stage" if isinstance(schedule, PipelineScheduleSingle) else "_stages"
    setattr(schedule, f"{name}_forward_initialized", True)  # torch's shape inference must not run
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
    """Returns the forwards of a schedule's plan. A stage's weights are gathered before its first forward and sharded
    after its last.

    torch's forward-only step cannot run plans with V placement, and gathers weights where a backward would need them.
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
        if action.computation_type.name in ("SEND_F", "RECV_F", "WAIT_SEND_F"):
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


@functools.lru_cache(maxsize=64)
def planned_actions(
    name: str, pp: int, stages_of_rank: tuple[tuple[int, ...], ...], num_microbatches: int
) -> list[list[tuple[int, str, int]]]:
    """Returns each rank's actions in one step of a torch schedule, without process groups, for planning. Cached:
    torch takes a second for many stages.

    Returns:
        For every rank in order, (stage, kind, microbatch). Kinds are F (forward), B (whole backward), I (backward for
        the inputs) and W (backward for the weights).
    """
    schedule_class: Any = get_schedule_class(name)
    if issubclass(schedule_class, PipelineScheduleSingle):  # these expose no plan
        ahead = [num_microbatches if name == "GPipe" else pp - rank for rank in range(pp)]
        return [forward_ahead(rank, min(ahead[rank], num_microbatches), num_microbatches) for rank in range(pp)]
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


def forward_ahead(stage: int, ahead: int, num_microbatches: int) -> list[tuple[int, str, int]]:
    """Returns the actions of a stage: `ahead` forwards, then backward and forward in turn, then the remaining
    backwards."""
    actions = [(stage, "F", index) for index in range(ahead)]
    for index in range(num_microbatches):
        actions.append((stage, "B", index))
        if ahead + index < num_microbatches:
            actions.append((stage, "F", ahead + index))
    return actions


class _StageStandIn:
    """A stage of rank 0 with only the attributes that schedules read to make their plan."""

    def __init__(self, index: int, num_stages: int, pp: int):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, num_stages, pp, 0
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.has_backward, self.submod, self.device = True, None, torch.device("cpu")


def _no_loss(*_: object) -> None:
    raise AssertionError("a plan computes nothing")
