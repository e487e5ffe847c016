"""Muon: a matrix's step is its orthogonalised momentum (Jordan et al., kellerjordan.github.io/posts/muon).

Muon trains the weights of linear layers (including adapters and encoders) and each expert of a mixture separately. An
expert's matrix is the one in transformers' module: fused gate and up projections are one matrix. Outputs count as
rows, whether a stack is transposed or not.

AdamW trains the rest, as Jordan et al. and Moonlight (Liu et al., arXiv:2502.16982) do: embeddings and the head,
whose rows belong to single tokens, so that few tokens of a step use a row; norm weights and biases, which are not
matrices; convolutions; and routers, whose rows belong to single experts, like a head over experts. Roles follow from
the owning modules (optimizers/roles.py).

Results equal torch.optim.Muon's. Orthogonalising a shard does not give the shard of the orthogonalised matrix, so
whole matrices are orthogonalised. Momentum stays sharded.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.optimizers.adamw import STATE as ADAMW_STATE
from automodel_rl.optimizers.adamw import adamw_of
from automodel_rl.optimizers.description import (
    LR_FACTOR,
    Named,
    OptimizerDescription,
    StateNames,
    trained_parameters,
)
from automodel_rl.optimizers.muon_reference import reference
from automodel_rl.optimizers.roles import Role, roles_of
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.whole_matrices import GroupOf, on_whole_matrices

MOMENTUM = "momentum_buffer"
STATE = StateNames((MOMENTUM,))

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration (Jordan et al.)."""

SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for sharded matrices, and for stacks of matrices. A step is a collective of their ranks.

    Args:
        named: names and parameters [m, n], or stacks [k, m, n], fp32 or float64.
        transposed: names of parameters stored as [inputs, outputs], or stacks of such.
    """

    def __init__(self, named: Named, config: OptimizerConfig, group_of: GroupOf, transposed: Collection[str] = ()):
        peak = config.muon.lr or config.lr
        members: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in named:
            members.setdefault(config.of_parameter(name, peak), []).append(parameter)
        groups = [
            {"params": parameters, LR_FACTOR: factor, "weight_decay": decay}
            for (factor, decay), parameters in members.items()
        ]
        super().__init__(groups, {"lr": peak})
        self.config, self.group_of = config.muon, group_of
        self._transposed = {parameter for name, parameter in named if name in transposed}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes one step. Parameters without a gradient are unchanged."""
        work = functools.partial(orthogonal, num_steps=self.config.ns_steps)
        for group in self.param_groups:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter, direction in on_whole_matrices(work, self._averaged, stepped, self.group_of):
                weight, rate = local_tensor(parameter), group["lr"]
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(direction, alpha=-rate * self._rate_factor(parameter))

    def _averaged(self, parameter: nn.Parameter) -> Tensor:
        """Returns this rank's shard of the averaged gradient, in the dtype for orthogonalisation."""
        if MOMENTUM not in self.state[parameter]:
            self.state[parameter][MOMENTUM] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        momentum, gradient = local_tensor(self.state[parameter][MOMENTUM]), local_tensor(parameter.grad)
        momentum.lerp_(gradient, 1 - self.config.momentum)
        averaged = gradient.lerp(momentum, self.config.momentum) if self.config.nesterov else momentum
        return averaged.to(torch.float64 if averaged.dtype == torch.float64 else torch.bfloat16)

    def _rate_factor(self, parameter: nn.Parameter) -> float:
        rows, columns = parameter.mT.shape[-2:] if parameter in self._transposed else parameter.shape[-2:]
        if self.config.adjust_lr_fn == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonal(matrix: Tensor, num_steps: int) -> Tensor:
    """Returns an approximation of the nearest orthogonal matrix, with singular values around 1, in the same shape and
    dtype.

    On CPUs, bf16 products are computed in fp32 and rounded to bf16: few CPUs have bf16 instructions, and without them
    torch takes 10 to 30 times as long. The numbers are the same up to the order of sums.

    Args:
        matrix: [m, n] or a stack [k, m, n]. In bf16, as torch.optim.Muon computes, or in float64, to compare layouts
            exactly.
    """
    a, b, c = COEFFICIENTS
    in_fp32 = matrix.dtype == torch.bfloat16 and matrix.device.type == "cpu"
    product_dtype = torch.float32 if in_fp32 else matrix.dtype

    def rounded(product: Tensor) -> Tensor:
        return product.to(matrix.dtype).to(product_dtype)

    stack = matrix if matrix.ndim == 3 else matrix[None]
    is_tall = stack.shape[-2] > stack.shape[-1]
    wide = stack.mT if is_tall else stack
    wide = (wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)).to(product_dtype)
    for _ in range(num_steps):
        gram = rounded(wide @ wide.mT)
        polynomial = rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
        wide = rounded(torch.baddbmm(wide, polynomial, wide, beta=a))
    wide = wide.to(matrix.dtype)
    return (wide.mT if is_tall else wide).view_as(matrix)


def _build(part: nn.Module, config: OptimizerConfig, group_of: GroupOf) -> list[torch.optim.Optimizer]:
    roles, named = roles_of(part), trained_parameters(part)
    names = _matrix_names(roles)
    matrices: Named = [(name, parameter) for name, parameter in named if name in names]
    others: Named = [(name, parameter) for name, parameter in named if name not in names]
    transposed = {name for name in names if roles[name] is Role.TRANSPOSED_MATRIX}
    muon = [Muon(matrices, config, group_of, transposed)] if matrices else []
    return [*muon, *adamw_of(others, roles.keys(), config)]


def _matrix_names(roles: dict[str, Role]) -> set[str]:
    """Returns the names of the weights that Muon trains, if they are trained at all."""
    return {name for name, role in roles.items() if role in (Role.MATRIX, Role.TRANSPOSED_MATRIX)}


def _state_names(part: nn.Module) -> dict[str, StateNames]:
    names = _matrix_names(roles_of(part))
    trained = trained_parameters(part, remove_duplicate=False)
    return {name: STATE if name in names else ADAMW_STATE for name, _ in trained}


MUON = OptimizerDescription(_build, _state_names, reference)
