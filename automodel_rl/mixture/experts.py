"""Runs the experts of a mixture on tokens sorted by expert, with or without expert parallelism.

`experts_forward` is registered with transformers' ExpertsInterface and replaces the loop in every mixture's experts
module; routers stay the models' own. With expert parallelism a rank holds a slice of the experts, and tokens travel to
them and back.

Shape letters: n tokens, K experts of a token, s = n * K slots, E experts of the model, e experts of this rank, H hidden
size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from automodel_rl.compat.modules import apply_gate
from automodel_rl.parallel.collectives import AllToAll, all_to_all
from automodel_rl.parallel.sharding import local_tensor

EXPERTS = "automodel_rl"
"""Name under which transformers knows the function."""


def register_experts() -> None:
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


def experts_of(part: nn.Module) -> list[Any]:
    """The experts modules of a part, whose forward goes through the interface."""
    return [module for name, module in part.named_modules() if name.endswith(".experts")]


def experts_forward(module: Any, hidden_nH: Tensor, experts_nK: Tensor, weights_nK: Tensor) -> Tensor:
    """Weighted sum of each token's experts.

    Args:
        module: transformers' experts module, with `ep_group` set (None without expert parallelism).
        hidden_nH: hidden states of the tokens.
        experts_nK: ids of the experts chosen for each token.
        weights_nK: weights of these experts.

    Returns:
        [n, H] in the dtype of `hidden_nH`.
    """
    expert_s, order = experts_nK.flatten().sort(stable=True)
    place = _inverse(order)
    slots_sH = ToSlots.apply(hidden_nH, order, place)
    # Not bincount: the host would wait for the device, in every layer, to learn the largest id.
    bounds = torch.searchsorted(expert_s, torch.arange(module.num_experts + 1, device=expert_s.device))
    counts_E = bounds.diff()
    if module.ep_group is None:
        outputs_sH = _run(module, slots_sH, counts_E)
    else:
        outputs_sH = _run_elsewhere(module, slots_sH, counts_E, module.ep_group)
    return FromSlots.apply(outputs_sH, weights_nK, order, place).to(hidden_nH.dtype)


class ToSlots(torch.autograd.Function):
    """A copy of each token for each of its experts, [n, H] to [s, H].

    torch's own backward of an index adds gradients up one by one, for it does not know that each token is taken K
    times. Here it is a gather and a sum.

    Args (of `apply`):
        hidden_nH: hidden states of the tokens.
        order: slot i of the result belongs to choice order[i] of all n * K choices, int64 [s].
        place: the inverse of `order`.
    """

    @staticmethod
    def forward(ctx: Any, hidden_nH: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.num_tokens = len(hidden_nH)
        return hidden_nH[order // (len(order) // len(hidden_nH))]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        (d_slots_sH,) = gradients
        return d_slots_sH[place].view(ctx.num_tokens, -1, d_slots_sH.shape[1]).sum(1), None, None


class FromSlots(torch.autograd.Function):
    """The weighted sum of each token's slots, [s, H] to [n, H].

    Args (of `apply`):
        outputs_sH: outputs of the experts.
        weights_nK: weights of each token's experts.
        order, place: as for `ToSlots`.
    """

    @staticmethod
    def forward(ctx: Any, outputs_sH: Tensor, weights_nK: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(outputs_sH, weights_nK, order, place)
        return (outputs_sH[place].view(*weights_nK.shape, -1) * weights_nK[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        outputs_sH, weights_nK, order, place = ctx.saved_tensors
        (d_hidden_nH,) = gradients
        d_outputs_sH = d_hidden_nH[order // weights_nK.shape[1]] * weights_nK.flatten()[order, None]
        by_choice_nKH = outputs_sH[place].view(*weights_nK.shape, -1)
        d_weights_nK = (by_choice_nKH * d_hidden_nH[:, None]).sum(-1)
        return d_outputs_sH.to(outputs_sH.dtype), d_weights_nK.to(weights_nK.dtype), None, None


def _run_elsewhere(module: Any, slots_sH: Tensor, counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends every slot to the rank of its expert, runs this rank's experts on what came, and sends results back."""
    slots_H, counts_e, route = _send(slots_sH, counts_E, group)
    return _send_back(_run(module, slots_H, counts_e), route)


@dataclass(frozen=True, eq=False)
class _Route:
    """The way of slots to this rank's experts.

    Attributes:
        sent, received: number of slots to and from every rank.
        by_expert: the order of arrived slots by expert.
        group: the ranks that share the experts.
    """

    sent: list[int]
    received: list[int]
    by_expert: Tensor
    group: dist.ProcessGroup


ADDED = 2
"""Slots of zeros that every rank adds for its last expert. They change nothing, and compiled layers need no graph for a
rank that gets no slots or one."""


# Outside of graphs: the compiler would leave out an exchange whose result has no elements on one of the ranks.
@torch.compiler.disable
def _send(slots_sH: Tensor, counts_E: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, _Route]:
    """Slots for this rank's experts in their order, numbers of slots of each, and the way that they came.

    The number of slots for each rank depends on the data, so the host waits for the device once in each layer.
    """
    size = group.size()
    each = [len(counts_E) // size] * size
    counts_re = all_to_all(counts_E, each, each, group).view(size, -1)  # from each rank for each expert of this rank
    sent, received = torch.stack([counts_E.view(size, -1).sum(1), counts_re.sum(1)]).tolist()
    arrived_H = AllToAll.apply(slots_sH, sent, received, group)
    expert_ids = torch.arange(each[0], device=counts_E.device).repeat(size)
    by_expert = expert_ids.repeat_interleave(counts_re.flatten(), output_size=sum(received)).argsort(stable=True)
    counts_e = counts_re.sum(0)
    counts_e[-1] += ADDED
    slots_H = F.pad(arrived_H[by_expert], (0, 0, 0, ADDED))
    return slots_H, counts_e, _Route(sent, received, by_expert, group)


@torch.compiler.disable
def _send_back(outputs_H: Tensor, route: _Route) -> Tensor:
    outputs_H = outputs_H[: len(outputs_H) - ADDED]
    return AllToAll.apply(outputs_H[_inverse(route.by_expert)], route.received, route.sent, route.group)


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes another one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _run(module: Any, slots_sH: Tensor, counts_e: Tensor) -> Tensor:
    """This rank's experts, each on its stretch of the slots."""
    hidden = _grouped_linear(slots_sH, module, "gate_up_proj", counts_e)
    return _grouped_linear(apply_gate(module, hidden), module, "down_proj", counts_e)


def _grouped_linear(inputs: Tensor, module: Any, name: str, counts_e: Tensor) -> Tensor:
    weight = local_tensor(getattr(module, name))
    weight = weight if module.is_transposed else weight.transpose(1, 2)  # [e, in, out]
    if inputs.dtype == torch.bfloat16 and not any(size % 8 for size in weight.shape[1:]):
        output = F.grouped_mm(inputs, weight, offs=counts_e.cumsum(0, dtype=torch.int32))
    else:
        stretches = inputs.split(counts_e.tolist())
        output = torch.cat([stretch @ matrix for stretch, matrix in zip(stretches, weight, strict=True)])
    if not module.has_bias:
        return output
    bias = local_tensor(getattr(module, f"{name}_bias"))
    return output + bias.repeat_interleave(counts_e, dim=0, output_size=len(inputs))
