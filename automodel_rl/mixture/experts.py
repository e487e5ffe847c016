"""Runs a mixture's experts on tokens sorted by expert, with or without expert parallelism.

`experts_forward`, registered with transformers' ExpertsInterface, replaces the loop in every mixture's experts
module; routers stay the models' own.

Shape letters: n tokens, K experts of a token, s = n * K slots, E experts of the model, e experts of this rank, H
hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from automodel_rl.compat.modules import apply_gate
from automodel_rl.families.family import Family
from automodel_rl.lora.experts import adapter_of
from automodel_rl.mixture.expert_exchange import ADDED, SumRows, TakeRows, send, send_back
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.quantized.stack import GROUPED_MULTIPLE, frozen_grouped_product, grouped_product
from automodel_rl.quantized.weight import quantized_weight_of

EXPERTS = "automodel_rl"
"""Name of `experts_forward` in transformers' registry."""


def register_experts() -> None:
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


def experts_of(part: nn.Module) -> list[Any]:
    """Returns the experts modules of a part."""
    return [module for name, module in part.named_modules() if name.endswith(".experts")]


def transpose_experts(model: nn.Module, family: Family) -> None:
    """Transposes stacked expert weights to [experts, inputs, outputs], as in the files, for families where
    transformers does not."""
    for module in experts_of(model) if family.transposes_experts else []:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not module.is_transposed and parameter.ndim == 3:
                setattr(module, name, nn.Parameter(parameter.detach().mT.contiguous()))
        module.is_transposed = True


def experts_forward(module: Any, hidden_nH: Tensor, experts_nK: Tensor, weights_nK: Tensor) -> Tensor:
    """Computes the weighted sum of each token's experts, [n, H] in the dtype of `hidden_nH`.

    Args:
        module: transformers' experts module, with `ep_group` set (None without expert parallelism).
    """
    if module.ep_group is None:
        return _mix(module, hidden_nH, experts_nK, weights_nK, module.num_experts, experts_nK.numel())
    arrived_AH, experts_AK, weights_AK, exchange = send(
        hidden_nH, experts_nK, weights_nK, module.num_experts, module.ep_group
    )
    own_experts = module.num_experts // module.ep_group.size()
    sums_AH = _mix(module, arrived_AH, experts_AK, weights_AK, own_experts, exchange.num_slots + ADDED)
    return SumRows.apply(send_back(sums_AH, exchange), exchange.tokens, exchange.rows)


def _mix(
    module: Any, hidden_nH: Tensor, experts_nK: Tensor, weights_nK: Tensor, num_experts: int, num_slots: int
) -> Tensor:
    """Computes the weighted sum of each token's experts on this rank, [n, H] in the dtype of `hidden_nH`.

    Args:
        experts_nK: indices of experts on this rank; `num_experts` for those elsewhere.
        weights_nK: their weights, 0 for experts elsewhere.
    """
    top_k = experts_nK.shape[1]
    expert_s, order = experts_nK.flatten().sort(stable=True)
    expert_s, order = expert_s[:num_slots], order[:num_slots]
    place_nK = _places(order, experts_nK.numel()).view_as(experts_nK)
    # Not bincount, which makes the host wait for the device in every layer.
    bounds = torch.searchsorted(expert_s, torch.arange(num_experts + 1, device=expert_s.device))
    slots_sH = TakeRows.apply(hidden_nH, order // top_k, place_nK)
    outputs_sH = _run(module, slots_sH, bounds.diff())
    return FromSlots.apply(outputs_sH, weights_nK, order, place_nK).to(hidden_nH.dtype)


def _places(order: Tensor, num_choices: int) -> Tensor:
    """Returns the slot of each choice; for experts elsewhere the last slot, which has weight 0."""
    slots = torch.arange(len(order), device=order.device)
    return torch.full((num_choices,), len(order) - 1, device=order.device).scatter_(0, order, slots)


class FromSlots(torch.autograd.Function):
    """Weighted sum of each token's slots, [s, H] to [n, H].

    Args (of `apply`):
        order: index of each slot's choice among all n * K choices, int64 [s].
        place_nK: the slot of each choice, int64.
    """

    @staticmethod
    def forward(ctx: Any, outputs_sH: Tensor, weights_nK: Tensor, order: Tensor, place_nK: Tensor) -> Tensor:
        ctx.save_for_backward(outputs_sH, weights_nK, order, place_nK)
        return (outputs_sH[place_nK] * weights_nK[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        outputs_sH, weights_nK, order, place_nK = ctx.saved_tensors
        (d_hidden_nH,) = gradients
        d_outputs_sH = d_hidden_nH[order // weights_nK.shape[1]] * weights_nK.flatten()[order, None]
        d_weights_nK = (outputs_sH[place_nK] * d_hidden_nH[:, None]).sum(-1)
        return d_outputs_sH.to(outputs_sH.dtype), d_weights_nK.to(weights_nK.dtype), None, None


def _run(module: Any, slots_sH: Tensor, counts_e: Tensor) -> Tensor:
    """Runs this rank's experts, each on its range of the slots."""
    if module.has_gate:
        hidden = apply_gate(module, _grouped_linear(slots_sH, module, "gate_up_proj", counts_e))
    else:
        hidden = module.act_fn(_grouped_linear(slots_sH, module, "up_proj", counts_e))
    return _grouped_linear(hidden, module, "down_proj", counts_e)


def _through_adapter(adapter: Any, inputs: Tensor, counts_e: Tensor) -> Tensor:
    """Multiplies each expert's slots by its own A and B. Ranks are zero-padded to the multiple that torch's grouped
    products need."""
    down_eri, up_eor = local_tensor(adapter.lora_A.weight), local_tensor(adapter.lora_B.weight)
    missing = -down_eri.shape[1] % GROUPED_MULTIPLE
    if missing and inputs.dtype == torch.bfloat16:
        down_eri, up_eor = F.pad(down_eri, (0, 0, 0, missing)), F.pad(up_eor, (0, missing))
    return grouped_product(grouped_product(inputs, down_eri.mT, counts_e), up_eor.mT, counts_e)


def _grouped_linear(inputs: Tensor, module: Any, name: str, counts_e: Tensor) -> Tensor:
    held = quantized_weight_of(module, name)
    if held is None:
        weight = local_tensor(getattr(module, name))
        output = grouped_product(inputs, weight if module.is_transposed else weight.mT, counts_e)
    else:
        output = frozen_grouped_product(inputs, held, module.is_transposed, counts_e)
    adapter = adapter_of(module, name)
    if adapter is not None:
        output = output + adapter.scale * _through_adapter(adapter, inputs, counts_e)
    if not module.has_bias:
        return output
    bias = local_tensor(getattr(module, f"{name}_bias"))
    return output + bias.repeat_interleave(counts_e, dim=0, output_size=len(inputs))
