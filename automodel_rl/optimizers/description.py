"""What the package knows of a kind of optimizer: engine, checkpoints, plan and verify follow from it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.parallel.whole_matrices import GroupOf

COUNT = "step"
"""Name in an optimizer's state of the number of steps that a parameter has taken, fp32 []."""

COUNT_BYTES = 4

LR_FACTOR = "lr_factor"
"""Key of a parameter group: what the learning rate of the schedule is multiplied by for this group."""


@dataclass(frozen=True)
class StateNames:
    """Names of what an optimizer keeps of one parameter.

    Attributes:
        moments: tensors of the parameter's shape and dtype, on the ranks that hold the parameter.
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
            parameter_bytes: of the parameter, or of a rank's shard of it.
        """
        return [*[parameter_bytes] * len(self.moments), *[COUNT_BYTES] * self.counts]


@dataclass(frozen=True)
class OptimizerDescription:
    """One kind of optimizer.

    Attributes:
        build: torch optimizers for what is trained of a part, with the groups of its layout. Each parameter has a
            gradient of its own layout or None, for which no step is taken. A step is a collective of the part's ranks.
        state_names: by name, of what is trained of a part; a tied weight under all of its names.
        reference: torch optimizers for plain transformers in one process, with which `verify` compares. It is written
            without the code of `build`.
    """

    build: Callable[[nn.Module, OptimizerConfig, GroupOf], list[torch.optim.Optimizer]]
    state_names: Callable[[nn.Module], dict[str, StateNames]]
    reference: Callable[[nn.Module, OptimizerConfig], list[torch.optim.Optimizer]]


Named = list[tuple[str, nn.Parameter]]


def trained_parameters(part: nn.Module, remove_duplicate: bool = True) -> Named:
    """What is trained of a part, with names.

    Args:
        part: of a model.
        remove_duplicate: a tied weight only under the first of its names.
    """
    named = part.named_parameters(remove_duplicate=remove_duplicate)
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]
