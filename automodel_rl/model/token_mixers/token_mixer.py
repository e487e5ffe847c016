"""The interface of token mixers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.parallel.tensor_parallel import TensorParallel

Rule = Callable[..., Tensor]
"""A mixer's computation over whole sequences, by kernels or in plain torch. Each mixer defines its arguments."""


@dataclass(frozen=True)
class TokenMixer(ABC):
    """One way in which layers mix tokens other than by attention.

    transformers' modules leak from one packed sequence into the next, so their forward is replaced. Their weights and
    per-token computations stay.

    Attributes:
        module: name of the module below a decoder layer.
        convolution: name of its convolution, which distinguishes it from other modules of that name.
        output: name of its last linear layer.
    """

    module: str
    convolution: str = "conv1d"
    output: str = "out_proj"
    has_kernels: ClassVar[bool] = True

    def of(self, layer: nn.Module) -> Any | None:
        """Returns a layer's token mixer; None if the layer uses attention."""
        found = dict(layer.named_children()).get(self.module)
        return found if found is not None and self.convolution in dict(found.named_children()) else None

    def set_apart(self, module: Any) -> None:
        """Moves parameters that stay in fp32 into a submodule `decay`."""
        del module

    @abstractmethod
    def choose_rule(self, device: torch.device, dtype: torch.dtype) -> Rule:
        """Returns the computation over whole sequences.

        Raises:
            InputError: required kernels are missing, or known to be wrong.
        """

    @abstractmethod
    def split(self, module: Any, tp: int) -> None:
        """Adjusts a module's sizes after its weights were split over `tp` ranks."""

    @abstractmethod
    def forward(
        self, module: Any, hidden: Tensor, microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None
    ) -> Tensor:
        """Returns the module's output for hidden states of this rank's tokens, both [1, t, H]."""

    def install(self, layer: Any, how: TensorParallel, rule: Rule) -> None:
        """Replaces the forward of a decoder layer's token mixer, if it has one, after tensor parallelism has split
        it."""
        module = self.of(layer)
        if module is None:
            return
        self.split(module, 1 if how.group is None else how.group.size())
        module.tp_group, module.rule = how.group, rule
        self.replace_forward(layer, module)

    def replace_forward(self, layer: Any, module: Any) -> None:
        """Replaces the forward of a module that receives all of its layer's arguments."""
        del layer

        def forward(
            module: Any,
            hidden_states: Tensor,
            *,
            microbatch: LocalMicrobatch,
            cp_group: dist.ProcessGroup | None,
            **_: Any,
        ) -> Tensor:
            return self.forward(module, hidden_states, microbatch, cp_group)

        module.forward = MethodType(forward, module)
