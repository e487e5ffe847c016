"""The state of FSDP2 units in the middle of a step. No other file uses torch's private names of FSDP.

Before torch 2.15 a unit accumulates gradients of several microbatches in a tensor beside its gathered weights; from
2.15 on in their `grad`. Checked with torch 2.11, 2.13 and 2.15; versions in between with other names raise.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from automodel_rl.compat.versions import TORCH

SUMS_IN_GRAD = TORCH >= (2, 15)
"""Whether a gathered weight's own `grad` is the sum over microbatches, in FSDP's reduce dtype."""

HAS_RESET = TORCH >= (2, 13)
"""Whether FSDP itself can be reset after a failed step, as since torch 2.13."""


def drop_unsharded_gradients(unit: FSDPModule) -> None:
    """Drops a unit's unsharded gradients that have not been reduced."""
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group is not None else ():
        if not SUMS_IN_GRAD:
            parameter.unsharded_accumulated_grad = None
        if "_unsharded_param" in vars(parameter):  # it exists once the weight has been gathered
            parameter._unsharded_param.grad = None


def gathered_names(root: nn.Module) -> list[str]:
    """Returns the names of a wrapped model's parameters that FSDP gathers."""
    gathered = set()
    for module in root.modules():
        group: Any = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        gathered |= {id(parameter.sharded_param) for parameter in (group.fsdp_params if group is not None else ())}
    return [name for name, parameter in root.named_parameters() if id(parameter) in gathered]


def gradient_sum(unit: FSDPModule, weight: Tensor) -> Tensor:
    """Returns a buffer to add to, in the reduce dtype: a gathered weight's gradients summed over a step's
    microbatches, not yet reduced over ranks.

    Additions are neither rounded to the weight's dtype nor copied. FSDP reduces a unit's gradients together, in one
    dtype, so the unit's other weights get such a sum, too.
    """
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    sums = {}
    for parameter in group.fsdp_params:
        gathered = parameter.unsharded_param
        if SUMS_IN_GRAD:
            if gathered.grad is None and gathered.requires_grad:
                gathered.grad = torch.zeros_like(gathered, dtype=gathered.grad_dtype, requires_grad=False)
            sums[gathered] = gathered.grad
            continue
        if parameter.unsharded_accumulated_grad is None and gathered.requires_grad:
            dtype = parameter.reduce_dtype or gathered.dtype
            parameter.unsharded_accumulated_grad = torch.zeros_like(gathered, dtype=dtype, requires_grad=False)
        sums[gathered] = parameter.unsharded_accumulated_grad
    return sums[weight]


def keep_gradients(root: nn.Module, dtype: torch.dtype) -> None:
    """Keeps gradient shards in the reduce dtype if weights are stored in a narrower one. Call it on the FSDP root
    once weights have storage, and before the first forward."""
    for parameter in root.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = dtype
    if SUMS_IN_GRAD:
        return
    state: Any = root._get_fsdp_state()  # type: ignore[operator]
    state._lazy_init()  # otherwise the next forward calls it and sets the gradients' dtype
    for unit in state._state_ctx.all_states:
        if unit._fsdp_param_group is not None:
            unit._fsdp_param_group._orig_dtype = None


def reset_fsdp(root: FSDPModule) -> None:
    """Ends an interrupted step of a model's units, and shards their weights."""
    state: Any = root._get_fsdp_state()
    if state._is_root is None:  # no forward yet
        return
    if HAS_RESET:
        root.reset_iter_state()
        return
    if state._device.type == "cuda":
        torch.cuda.synchronize(state._device)
    for name in ("all_gather_state", "reduce_scatter_state"):
        assert name in vars(state._comm_ctx), f"FSDP of torch {torch.__version__} has no {name}"
        setattr(state._comm_ctx, name, None)
    state._comm_ctx.post_forward_order.clear()
    for unit in state._state_ctx.all_states:
        unit._training_state = type(unit._training_state).IDLE
        group = unit._fsdp_param_group
        if group is None:
            continue
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
        group._reshard_after_forward_event = group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = type(group._training_state).IDLE
        group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
