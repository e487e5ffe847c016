"""AdamW, with weight decay for matrices and embeddings, and without for biases (of experts, too) and norm weights."""

import torch
from torch import nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.optimizers.description import (
    DECAYS,
    LR_FACTOR,
    Named,
    OptimizerDescription,
    StateNames,
    trained_parameters,
)
from automodel_rl.parallel.sharding import by_mesh
from automodel_rl.parallel.whole_matrices import GroupOf

STATE = StateNames(("exp_avg", "exp_avg_sq"), counts=True)


def adamw_of(named: Named, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """AdamW for named parameters, in a list, which is empty if there are no parameters."""
    if not named:  # a stage may have no adapter
        return []
    members: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        factor, decay = config.of_parameter(name, config.lr)
        decays = parameter.ndim >= 2 and not name.endswith("bias")
        members.setdefault((factor, decay if decays else 0.0, decays), []).append(parameter)
    groups = [
        {"params": group, "weight_decay": decay, LR_FACTOR: factor, DECAYS: decays}
        for (factor, decay, decays), parameters in members.items()
        for group in by_mesh(parameters)
    ]
    fused = all(parameter.is_cuda for _, parameter in named)
    return [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)]


def plain_adamw(named: Named, config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's AdamW in one process, for named parameters of a transformers model."""
    decayed = [p for name, p in named if p.ndim > 1 and not name.endswith("bias")]
    others = [p for name, p in named if p.ndim == 1 or name.endswith("bias")]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay, LR_FACTOR: 1.0},
        {"params": others, "weight_decay": 0, LR_FACTOR: 1.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def _build(part: nn.Module, config: OptimizerConfig, _: GroupOf) -> list[torch.optim.Optimizer]:
    return adamw_of(trained_parameters(part), config)


def _state_names(part: nn.Module) -> dict[str, StateNames]:
    return {name: STATE for name, _ in trained_parameters(part, remove_duplicate=False)}


def _reference(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    return [plain_adamw(list(model.named_parameters()), config)]


ADAMW = OptimizerDescription(_build, _state_names, _reference)
