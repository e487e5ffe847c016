"""AdamW with 8-bit moments of matrices, embeddings and stacks (Dettmers et al., arXiv:2110.02861).

Training is the same on every layout: blocks run along rows of the whole parameter, FSDP, ep and pp cut between rows,
and rounding depends only on step and index. The first moment is kept, and the root of the second one, whose range is
half as wide on a log scale, so that small second moments do not become 0. Norm weights and biases have full-precision
moments.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.errors import InputError
from automodel_rl.optimizers.adamw import STATE as FULL_STATE
from automodel_rl.optimizers.adamw import adamw_groups, adamw_of
from automodel_rl.optimizers.adamw_8bit_reference import reference
from automodel_rl.optimizers.description import (
    COUNT,
    Named,
    OptimizerDescription,
    StateNames,
    trained_parameters,
)
from automodel_rl.optimizers.own_steps import Noise, names_for_rounding, step_in_row_blocks, step_scalars, write_weight
from automodel_rl.optimizers.roles import roles_of
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.whole_matrices import GroupOf
from automodel_rl.quantized.dynamic_codes import BLOCK, decode, encode, thresholds

FIRST, ROOT = "exp_avg", "exp_avg_sq_root"
STATE = StateNames((FIRST, ROOT), counts=True, in_8_bits=True)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments. Every rank steps its own shards.

    Args:
        groups: torch's parameter groups, of parameters [..., rows, columns], bfloat16, fp32 or float64.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig, names: Mapping[nn.Parameter, str]):
        self.names = names
        super().__init__(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes one step. Parameters without a gradient are unchanged."""
        for group in self.param_groups:
            numbers = functools.cache(functools.partial(step_scalars, group))
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(STATE.empty(parameter))
                state[COUNT] += 1
                steps, device, dtype = int(state[COUNT].item()), parameter.device, parameter.grad.dtype
                moments = [state[name] for name in STATE.tensors]
                place, above = (steps, self.names[parameter]), thresholds(steps).to(device, dtype)
                step_in_row_blocks(step_of_rows, parameter, moments, place, numbers(steps, device, dtype), above=above)


def step_of_rows(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    root: Tensor,
    first_scales: Tensor,
    root_scales: Tensor,
    *,
    noise: Noise,
    numbers: Tensor,
    above: Tensor,
) -> None:
    """Takes a step of some rows, in place.

    Args:
        gradient: [rows, I], in the compute dtype.
        first, root: codes of the first moment and of the root of the second one, uint8 [rows, I].
        first_scales, root_scales: their scales, float32 [rows, b].
        above: the step's thresholds, [B] in the gradient's dtype.
    """
    kept, rate, beta1, rest1, beta2, rest2, divisor, eps = numbers.unbind()
    moment = decode(first, first_scales, True, gradient.dtype) * beta1 + gradient * rest1
    before = decode(root, root_scales, False, gradient.dtype)
    new_root = (before * before * beta2 + gradient * gradient * rest2).sqrt()
    updated = weight.to(gradient.dtype) * kept - rate * moment / (new_root / divisor + eps)
    write_weight(weight, updated, noise)
    for values, codes, scales, is_signed in (
        (moment, first, first_scales, True),
        (new_root, root, root_scales, False),
    ):
        new_codes, new_scales = encode(values, is_signed, above)
        codes.copy_(new_codes)
        scales.copy_(new_scales)


def _in_8_bits(named: Named) -> Named:
    return [(name, parameter) for name, parameter in named if parameter.ndim > 1]


def _build(part: nn.Module, config: OptimizerConfig, _: GroupOf) -> list[torch.optim.Optimizer]:
    decayed, named = roles_of(part).keys(), trained_parameters(part)
    matrices = _in_8_bits(named)
    for name, parameter in matrices:
        columns = local_tensor(parameter).shape[-1]
        if columns != parameter.shape[-1] and columns % BLOCK:
            raise InputError(
                f"optimizer.name=adamw_8bit: rows of {name} are cut into parts of {columns} values, which are not "
                f"whole blocks of {BLOCK}: use adamw, or another parallel.tp"
            )
    others = [pair for pair in named if pair[1].ndim <= 1]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(AdamW8bit(adamw_groups(matrices, decayed, config), config, names_for_rounding(matrices)))
    return [*optimizers, *adamw_of(others, decayed, config)]


def _state_names(part: nn.Module) -> dict[str, StateNames]:
    trained = trained_parameters(part, remove_duplicate=False)
    matrices = {name for name, _ in _in_8_bits(trained)}
    return {name: STATE if name in matrices else FULL_STATE for name, _ in trained}


ADAMW_8BIT = OptimizerDescription(_build, _state_names, reference)
