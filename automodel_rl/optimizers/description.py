"""Descriptions of optimizers, the basis of Engine, checkpoints, plan and verify."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_rl.config import OptimizerConfig
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.whole_matrices import GroupOf
from automodel_rl.quantized.dynamic_codes import BLOCK, value_bytes

COUNT = "step"
"""Key in an optimizer's state: number of steps that a parameter has taken, fp32 []."""

SCALES = "_scales"
"""Suffix of a moment's scales after its name."""

LR_FACTOR = "lr_factor"
"""Key in a parameter group: its factor of the schedule's learning rate."""

DECAYS = "decays"
"""Key in an AdamW parameter group: whether its parameters have weight decay."""


@dataclass(frozen=True)
class StateNames:
    """Names of an optimizer's tensors for one parameter.

    Attributes:
        moments: tensors of the parameter's shape and layout, in its gradient's dtype.
        in_8_bits: whether moments are codes instead, uint8, with scales (quantized/dynamic_codes.py).
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
        """Returns a new state of zeros, laid out over ranks like the parameter. `gradient` is its gradients' dtype;
        by default `gradient_dtype`."""
        count = {COUNT: torch.zeros(())} if self.counts else {}
        dtype = torch.uint8 if self.in_8_bits else gradient or gradient_dtype(parameter)
        state = count | {name: torch.zeros_like(parameter.detach(), dtype=dtype) for name in self.moments}
        if self.in_8_bits:
            state |= {name + SCALES: _empty_scales(parameter.detach()) for name in self.moments}
        return state

    def sizes(self, parameter: Tensor) -> list[int]:
        """Returns the bytes of every tensor of a parameter's state on this rank."""
        shard = local_tensor(parameter.detach()).to("meta")
        return [tensor.nbytes for tensor in self.empty(shard, gradient_dtype(parameter)).values()]

    def value_bytes(self, dtype: torch.dtype, shape: Sequence[int]) -> float:
        """Returns the bytes of moments per value of a parameter, given its gradient's dtype and its shape."""
        return len(self.moments) * (value_bytes(shape[-1]) if self.in_8_bits else dtype.itemsize)


def _empty_scales(parameter: Tensor) -> Tensor:
    """Returns zero scales for a parameter's blocks, float32."""
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
    """Returns the dtype of a parameter's gradients, which may be wider than its own."""
    return parameter.grad_dtype or parameter.dtype


def is_narrow(parameter: Tensor) -> bool:
    """Returns whether a parameter is narrower than its gradients, so that a step rounds it."""
    return parameter.dtype != gradient_dtype(parameter)


RunPlain = Callable[[], list[Tensor]]
"""Runs a plain model's forward on examples that use every parameter, and returns the logits."""


@dataclass(frozen=True)
class OptimizerDescription:
    """One kind of optimizer.

    Attributes:
        build: creates the torch optimizers for a part's trained parameters, with the groups of its layout. Gradients
            have the parameters' layout; parameters without one take no step. A step is a collective of the part's
            ranks.
        state_names: returns the state's names for a part's trained parameters by name; for a tied weight under all of
            its names.
        reference: creates the torch optimizers for plain transformers in one process, with which `verify` compares.
            It shares no code with `build`, and observes each parameter's use while the model runs.
    """

    build: Callable[[nn.Module, OptimizerConfig, GroupOf], list[torch.optim.Optimizer]]
    state_names: Callable[[nn.Module], dict[str, StateNames]]
    reference: Callable[[nn.Module, OptimizerConfig, RunPlain], list[torch.optim.Optimizer]]


Named = list[tuple[str, nn.Parameter]]


def trained_parameters(part: nn.Module, remove_duplicate: bool = True) -> Named:
    """Returns names and trained parameters of a part; unless `remove_duplicate`, a tied weight under all of its
    names."""
    named = part.named_parameters(remove_duplicate=remove_duplicate)
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]
