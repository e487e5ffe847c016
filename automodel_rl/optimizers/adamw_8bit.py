"""AdamW whose moments of matrices, embeddings and stacks are kept in 8 bits (Dettmers et al., arXiv:2110.02861).

Blocks lie along rows of the whole parameter, FSDP, ep and pp cut between rows, and rounding depends on steps and places
alone: so what is trained is the same on every layout. Kept are the first moment and the root of the second one, whose
range is half as wide on a scale of logarithms, so that a small second moment is not taken for 0. Norm weights and
biases have moments in full.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.compat.compilation import compile_for_any_size
from automodel_rl.config import OptimizerConfig
from automodel_rl.errors import InputError
from automodel_rl.few_bits.dynamic_codes import BLOCK, decode, encode, thresholds
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
from automodel_rl.optimizers.roles import roles_of
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.whole_matrices import GroupOf

FIRST, ROOT = "exp_avg", "exp_avg_sq_root"
MOST_VALUES = 1 << 24
"""Most values of which a step has the moments in full at a time."""

STATE = StateNames((FIRST, ROOT), counts=True, in_8_bits=True)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments in 8 bits. Every rank takes its own part of a step.

    Args:
        groups: torch's parameter groups, of parameters [..., rows, columns], fp32 or float64.
        config: learning rate, betas and eps.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig):
        super().__init__(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes one step. Parameters without a gradient stay as they are.

        Args:
            closure: part of torch's interface; it is not called.
        """
        for group in self.param_groups:
            numbers = functools.cache(functools.partial(_numbers, group))
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(STATE.empty(parameter))
                state[COUNT] += 1
                held = (parameter.detach(), parameter.grad, *(state[name] for name in STATE.tensors))
                of_step = numbers(int(state[COUNT].item()), parameter.device, parameter.dtype)
                _step_in_parts([*map(local_tensor, held)], *of_step)


def _step_in_parts(held: list[Tensor], numbers: Tensor, above: Tensor) -> None:
    """`step_of_shard` for some rows at a time, as it has their moments as values."""
    weight = held[0]
    if not weight.numel():  # a rank without rows
        return
    step = _compiled_step() if weight.is_cuda else step_of_shard
    width = -(-weight.shape[-1] // BLOCK) * BLOCK
    matrices = [tensor.view(-1, tensor.shape[-1]) for tensor in held]
    for parts in zip(*(matrix.split(max(1, MOST_VALUES // width)) for matrix in matrices), strict=True):
        step(*parts, numbers=numbers, above=above)


def _numbers(group: dict[str, Any], steps: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A group's numbers for a step, as tensors, since a compiler makes a graph for each number that is none."""
    beta1, beta2 = group["betas"]
    kept, divisor = 1 - group["lr"] * group["weight_decay"], (1 - beta2**steps) ** 0.5
    numbers = [kept, group["lr"] / (1 - beta1**steps), beta1, 1 - beta1, beta2, 1 - beta2, divisor, group["eps"]]
    return torch.tensor(numbers, dtype=dtype, device=device), thresholds(steps).to(device, dtype)


@functools.cache
def _compiled_step() -> Callable[..., None]:
    return compile_for_any_size(step_of_shard)


def step_of_shard(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    root: Tensor,
    first_scales: Tensor,
    root_scales: Tensor,
    *,
    numbers: Tensor,
    above: Tensor,
) -> None:
    """A step of some rows, in place.

    Args:
        weight, gradient: [rows, I].
        first, root: codes of the first moment and of the root of the second one, uint8 [rows, I].
        first_scales, root_scales: their scales, float32 [rows, b].
        numbers: factor of the weight, rate, each beta and 1 less it, divisor of the root, and eps, [8] of the weight's
            dtype.
        above: the step's thresholds, [B] of the weight's dtype.
    """
    kept, rate, beta1, rest1, beta2, rest2, divisor, eps = numbers.unbind()
    moment = decode(first, first_scales, True, weight.dtype) * beta1 + gradient * rest1
    before = decode(root, root_scales, False, weight.dtype)
    new_root = (before * before * beta2 + gradient * gradient * rest2).sqrt()
    weight.mul_(kept).sub_(rate * moment / (new_root / divisor + eps))
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
        optimizers.append(AdamW8bit(adamw_groups(matrices, decayed, config), config))
    return [*optimizers, *adamw_of(others, decayed, config)]


def _state_names(part: nn.Module) -> dict[str, StateNames]:
    trained = trained_parameters(part, remove_duplicate=False)
    matrices = {name for name, _ in _in_8_bits(trained)}
    return {name: STATE if name in matrices else FULL_STATE for name, _ in trained}


ADAMW_8BIT = OptimizerDescription(_build, _state_names, reference)
