"""AdamW, with weight decay for parameters with a role (optimizers/roles.py), which excludes biases, norm weights and
the like."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.optimizers.description import (
    COUNT,
    DECAYS,
    LR_FACTOR,
    Named,
    OptimizerDescription,
    RunPlain,
    StateNames,
    is_narrow,
    trained_parameters,
)
from automodel_rl.optimizers.observed_uses import observed_uses
from automodel_rl.optimizers.own_steps import Noise, names_for_rounding, step_in_row_blocks, step_scalars, write_weight
from automodel_rl.optimizers.roles import roles_of
from automodel_rl.parallel.sharding import by_mesh
from automodel_rl.parallel.whole_matrices import GroupOf

STATE = StateNames(("exp_avg", "exp_avg_sq"), counts=True)


class RoundingAdamW(torch.optim.AdamW):
    """AdamW for bfloat16 weights, rounded stochastically. Moments are as wide as gradients."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig, names: Mapping[nn.Parameter, str]):
        super().__init__(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=False)
        self.names = names

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes one step. Parameters without a gradient are unchanged."""
        for group in self.param_groups:
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(STATE.empty(parameter))
                state[COUNT] += 1
                steps = int(state[COUNT].item())
                numbers = step_scalars(group, steps, parameter.device, parameter.grad.dtype)
                moments, place = [state[name] for name in STATE.tensors], (steps, self.names[parameter])
                step_in_row_blocks(step_of_rows, parameter, moments, place, numbers)


def step_of_rows(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, *, noise: Noise, numbers: Tensor
) -> None:
    """Takes a step of some rows in place. Gradient and moments are in the compute dtype, all [rows, I]."""
    kept, rate, beta1, rest1, beta2, rest2, divisor, eps = numbers.unbind()
    first.mul_(beta1).add_(gradient * rest1)
    second.mul_(beta2).add_(gradient * gradient * rest2)
    updated = weight.to(gradient.dtype) * kept - rate * first / (second.sqrt() / divisor + eps)
    write_weight(weight, updated, noise)


def adamw_of(named: Named, decayed: Collection[str], config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Returns a list with AdamW for named parameters, or an empty list if there are none. `decayed` names those with
    weight decay."""
    if not named:  # a stage may have no adapter
        return []
    groups = adamw_groups(named, decayed, config)
    if any(is_narrow(parameter) for _, parameter in named):
        return [RoundingAdamW(groups, config, names_for_rounding(named))]
    fused = all(parameter.is_cuda for _, parameter in named)
    return [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)]


def adamw_groups(named: Named, decayed: Collection[str], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Returns torch's parameter groups for `adamw_of`, by rate, decay and mesh."""
    members: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        factor, decay = config.of_parameter(name, config.lr)
        decays = name in decayed
        members.setdefault((factor, decay if decays else 0.0, decays), []).append(parameter)
    return [
        {"params": group, "weight_decay": decay, LR_FACTOR: factor, DECAYS: decays}
        for (factor, decay, decays), parameters in members.items()
        for group in by_mesh(parameters)
    ]


def plain_adamw(
    parameters: Iterable[nn.Parameter], decayed: Collection[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Returns torch's AdamW for one process. `decayed` are the parameters with weight decay."""
    by_decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        by_decay[parameter in decayed].append(parameter)
    groups = [
        {"params": by_decay[True], "weight_decay": config.weight_decay, LR_FACTOR: 1.0},
        {"params": by_decay[False], "weight_decay": 0, LR_FACTOR: 1.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def _build(part: nn.Module, config: OptimizerConfig, _: GroupOf) -> list[torch.optim.Optimizer]:
    return adamw_of(trained_parameters(part), roles_of(part).keys(), config)


def _state_names(part: nn.Module) -> dict[str, StateNames]:
    return {name: STATE for name, _ in trained_parameters(part, remove_duplicate=False)}


def _reference(model: nn.Module, config: OptimizerConfig, run: RunPlain) -> list[torch.optim.Optimizer]:
    return [plain_adamw(model.parameters(), observed_uses(model, run).decayed, config)]


ADAMW = OptimizerDescription(_build, _state_names, _reference)
