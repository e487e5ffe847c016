"""Observation of every tensor operation as it is computed."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CAST = torch.ops.aten._to_copy
"""The operation that changes a tensor's dtype or device."""


class OperationWatch(TorchDispatchMode):
    """A context in which `see` is called after every operation, including views and casts."""

    @abstractmethod
    def see(self, operation: Any, arguments: tuple[Any, ...], given: list[Tensor], made: list[Tensor]) -> None:
        """Handles an operation.

        Args:
            operation: such as `torch.ops.aten.mm`, without its overload.
            given: the tensors among all arguments.
            made: the tensors of its result.
        """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        self.see(func.overloadpacket, args, given, made)
        return result


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, cast to the target's dtype, with few kernels."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
