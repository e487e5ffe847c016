"""Descriptions of optimizers, from which the Engine, checkpoints, plan and verify follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_rl.config import OptimizerConfig
from automodel_rl.few_bits.dynamic_codes import BLOCK, value_bytes
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.whole_matrices import GroupOf

COUNT = "step"
"""Key in an optimizer's state. Its value is the number of steps that a parameter has taken, fp32 []."""

SCALES = "_scales"
"""What the name of a moment's scales adds to that of the moment."""

LR_FACTOR = "lr_factor"
"""Key in a parameter group. Its value is the group's factor of the schedule's learning rate."""

DECAYS = "decays"
"""Key in a parameter group of AdamW. Its value is whether the group's parameters have weight decay."""


@dataclass(frozen=True)
class StateNames:
    """Names of the tensors that an optimizer keeps for one parameter.

    Attributes:
        moments: names of tensors of the parameter's shape and its gradient's dtype, on the ranks that hold the
            parameter.
        counts: whether it keeps `COUNT`, too.
        in_8_bits: whether moments are codes instead, uint8, with scales of their own (few_bits/dynamic_codes.py).
    """

    moments: tuple[str, ...]
    counts: bool = False
    in_8_bits: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of moments and of their scales."""
        return (*self.moments, *(name + SCALES for name in self.moments)) if self.in_8_bits else self.moments

    @property
    def all(self) -> tuple[str, ...]:
        """Names of all tensors of the state."""
        return (COUNT, *self.tensors) if self.counts else self.tensors

    def empty(self, parameter: Tensor, gradient: torch.dtype | None = None) -> dict[str, Tensor]:
        """A new state of a parameter, all 0, laid out over ranks as the parameter is.

        Args:
            parameter: the parameter.
            gradient: the dtype of its gradients; None for what the parameter says.
        """
        count = {COUNT: torch.zeros(())} if self.counts else {}
        dtype = torch.uint8 if self.in_8_bits else gradient or gradient_dtype(parameter)
        state = count | {name: torch.zeros_like(parameter.detach(), dtype=dtype) for name in self.moments}
        if self.in_8_bits:
            state |= {name + SCALES: _empty_scales(parameter.detach()) for name in self.moments}
        return state

    def sizes(self, parameter: Tensor) -> list[int]:
        """Bytes of every tensor of the state of a parameter on this rank."""
        shard = local_tensor(parameter.detach()).to("meta")
        return [tensor.nbytes for tensor in self.empty(shard, gradient_dtype(parameter)).values()]

    def value_bytes(self, dtype: torch.dtype, shape: Sequence[int]) -> float:
        """Bytes of the moments of one value of a parameter, by its gradient's dtype and its shape."""
        return len(self.moments) * (value_bytes(shape[-1]) if self.in_8_bits else dtype.itemsize)


def _empty_scales(parameter: Tensor) -> Tensor:
    """Scales of a parameter's blocks, all 0, float32."""
    local = local_tensor(parameter)
    scales = local.new_zeros(*local.shape[:-1], -(-local.shape[-1] // BLOCK), dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((*parameter.shape[:-1], -(-parameter.shape[-1] // BLOCK)))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        scales, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=strides
    )


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients: its own, unless it is kept in a narrower one than gradients."""
    return parameter.grad_dtype or parameter.dtype


def is_narrow(parameter: Tensor) -> bool:
    """Whether a parameter is kept in a narrower dtype than its gradients, so that a step rounds it."""
    return parameter.dtype != gradient_dtype(parameter)


RunPlain = Callable[[], list[Tensor]]
"""Runs a plain model forward on examples in which every parameter takes part, and returns the logits."""


@dataclass(frozen=True)
class OptimizerDescription:
    """One kind of optimizer.

    Attributes:
        build: makes the torch optimizers for the trained parameters of a part, with the groups of its layout. The
            gradient of a parameter has the parameter's layout, or is None, and then no step is taken. A step is a
            collective of the part's ranks.
        state_names: gives the state's names for each trained parameter of a part, by the parameter's name; for a tied
            weight under all of its names.
        reference: makes the torch optimizers for plain transformers in one process, with which `verify` compares. It is
            written without the code of `build`, and decides what a parameter is by what happens to it while the model
            runs.
    """

    build: Callable[[nn.Module, OptimizerConfig, GroupOf], list[torch.optim.Optimizer]]
    state_names: Callable[[nn.Module], dict[str, StateNames]]
    reference: Callable[[nn.Module, OptimizerConfig, RunPlain], list[torch.optim.Optimizer]]


Named = list[tuple[str, nn.Parameter]]


def trained_parameters(part: nn.Module, remove_duplicate: bool = True) -> Named:
    """Names and parameters of what is trained in a part.

    Args:
        part: a part of a model.
        remove_duplicate: whether a tied weight comes only under the first of its names.
    """
    named = part.named_parameters(remove_duplicate=remove_duplicate)
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]
