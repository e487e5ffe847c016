"""The model's output head, as passed to output functions, and its matrix products."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch


@dataclass(frozen=True)
class Head:
    """One rank's output projection: a vocabulary head, or a linear head with a few outputs.

    Attributes:
        weight: this rank's shard, [V, H], or a whole linear head, [L, H]; detached if its gradient goes to
            `gradient`.
        softcap: if set, logits become softcap * tanh(logits / softcap).
        tp_group: the ranks of the vocabulary's shards, in order; None if this rank holds all of it.
        gradient: returns the weight's gradient summed over microbatches, [V, H] in fp32 or wider, to add to. Call it
            right before each addition: the sum may have been reduced since the forward. None: autograd gets the
            gradient.
        compiled: whether all but the matrix products is compiled.
        factor: multiplies the logits after the soft cap.
        copies: number of tp ranks that repeat a linear head's computation; each contributes an equal share of
            gradients.
    """

    weight: Tensor
    softcap: float | None = None
    tp_group: dist.ProcessGroup | None = None
    gradient: Callable[[], Tensor] | None = None
    compiled: bool = False
    factor: float = 1.0
    copies: int = 1

    @property
    def first_token(self) -> int:
        """Token id of the first row of `weight`."""
        return 0 if self.tp_group is None else self.tp_group.rank() * len(self.weight)


OutputFn = Callable[[Tensor, Head, LocalMicrobatch], Tensor]
"""(final hidden states [t, H], head, this rank's tokens) -> result [t, ...]. Runs inside the last stage."""


def accurate(dtype: torch.dtype) -> torch.dtype:
    """Returns the wider of the dtype and fp32."""
    return torch.promote_types(dtype, torch.float32)


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Computes total += a @ b in place, without materialising the product where the dtypes allow it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += accurate_matmul(a, b)


def accurate_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in fp32 or wider. On CUDA, products of 16-bit matrices are not rounded to 16 bits first."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).to(accurate(a.dtype))
