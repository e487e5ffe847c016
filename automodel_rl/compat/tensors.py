"""Private functions of torch that work on tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TorchDispatchMode", "copy_each", "tree_leaves"]


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, cast to the target's dtype, with few kernels."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
