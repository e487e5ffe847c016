"""Descriptions of optimizers, from which the Engine, checkpoints, plan and verify follow."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.parallel.whole_matrices import GroupOf

COUNT = "step"
"""Key in an optimizer's state. Its value is the number of steps that a parameter has taken, fp32 []."""

COUNT_BYTES = 4

LR_FACTOR = "lr_factor"
"""Key in a parameter group. Its value is the group's factor of the schedule's learning rate."""

DECAYS = "decays"
"""Key in a parameter group of AdamW. Its value is whether the group's parameters have weight decay."""


@dataclass(frozen=True)
class StateNames:
    """Names of the tensors that an optimizer keeps for one parameter.

    Attributes:
        moments: names of tensors of the parameter's shape and dtype, on the ranks that hold the parameter.
        counts: whether it keeps `COUNT`, too.
    """

    moments: tuple[str, ...]
    counts: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """Names of all tensors of the state."""
        return (COUNT, *self.moments) if self.counts else self.moments

    def sizes(self, parameter_bytes: int) -> list[int]:
        """Bytes of every tensor of the state.

        Args:
            parameter_bytes: size of the parameter, or of a rank's shard of it.
        """
        return [*[parameter_bytes] * len(self.moments), *[COUNT_BYTES] * self.counts]


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
