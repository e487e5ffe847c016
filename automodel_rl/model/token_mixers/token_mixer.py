"""The interface of a token mixer: all that the rest of the package asks of one."""

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
"""What a mixer computes over whole sequences; kernels or written out. Each mixer says of which tensors."""


@dataclass(frozen=True)
class TokenMixer(ABC):
    """One way in which layers mix tokens other than by attention.

    transformers' modules leak from one packed sequence into the next, so their forward is replaced. Their weights, and
    what they do with each token alone, stay.

    Attributes:
        module: name of the module below a decoder layer.
        convolution: name of the convolution below the module, which tells it from other modules of that name.
        output: name of the module's last linear layer.
        has_kernels: whether there are kernels for its rule.
    """

    module: str
    convolution: str = "conv1d"
    output: str = "out_proj"
    has_kernels: ClassVar[bool] = True

    def of(self, layer: nn.Module) -> Any | None:
        """A layer's module; None if the layer mixes tokens by attention."""
        found = dict(layer.named_children()).get(self.module)
        return found if found is not None and self.convolution in dict(found.named_children()) else None

    def set_apart(self, module: Any) -> None:
        """Moves parameters that stay in fp32 into a module of their own, `decay`.

        Args:
            module: transformers' module.
        """
        del module

    @abstractmethod
    def choose_rule(self, device: torch.device, dtype: torch.dtype) -> Rule:
        """What computes over whole sequences.

        Raises:
            InputError: kernels are needed and not there, or would be wrong.
        """

    @abstractmethod
    def split(self, module: Any, tp: int) -> None:
        """Tells a module how much of it a rank has.

        Args:
            module: transformers' module, whose weights are split.
            tp: number of ranks that split a layer.
        """

    @abstractmethod
    def forward(
        self, module: Any, hidden: Tensor, microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None
    ) -> Tensor:
        """A module's output, [1, t, H].

        Args:
            module: transformers' module.
            hidden: hidden states of this rank's tokens, [1, t, H].
            microbatch: this rank's tokens.
            cp_group: the ranks that share a microbatch.
        """

    def install(self, layer: Any, how: TensorParallel, rule: Rule) -> None:
        """Gives a decoder layer's module a forward over microbatches, if it has one.

        Args:
            layer: the layer, after tensor parallelism has split it.
            how: this rank's place among the ranks that split layers.
            rule: computes over whole sequences.
        """
        module = self.of(layer)
        if module is None:
            return
        self.split(module, 1 if how.group is None else how.group.size())
        module.tp_group, module.rule = how.group, rule
        self.replace_forward(layer, module)

    def replace_forward(self, layer: Any, module: Any) -> None:
        """Sets the forward of a module to which its layer hands on all arguments.

        Args:
            layer: the decoder layer.
            module: its module.
        """
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
