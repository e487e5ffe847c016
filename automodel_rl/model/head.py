"""The head of a model, as output functions get it, and its products."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch


@dataclass(frozen=True)
class Head:
    """The output projection as one rank holds it: the vocabulary's, or a linear one with a few outputs.

    Attributes:
        weight: this rank's part, [V, H], or the whole of a linear head, [L, H]; detached if its gradient goes to
            `gradient`.
        softcap: turns logits into softcap * tanh(logits / softcap), if not None.
        tp_group: the ranks that hold the parts of the vocabulary, in order; None if this rank holds all of it.
        gradient: gives the sum of the weight's gradients over microbatches, [V, H] in fp32 or wider, to which the head
            adds. It is asked for right before an addition, for the sum may have been reduced since the forward. None:
            autograd gets the gradient.
        compiled: whether what is not a matrix product is compiled.
        factor: multiplies the logits, after a soft cap.
        copies: number of tp ranks that all hold a linear head whole and compute with it alike. Each makes an equal
            share of the gradients, of hidden states and of the weight.
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
        """Token id of the weight's first row."""
        return 0 if self.tp_group is None else self.tp_group.rank() * len(self.weight)


OutputFn = Callable[[Tensor, Head, LocalMicrobatch], Tensor]
"""(final hidden states [t, H], head, this rank's part of the microbatch) -> result [t, ...]. It runs inside the last
stage."""


def accurate(dtype: torch.dtype) -> torch.dtype:
    """The dtype, at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in place and without a product of its own where the dtypes allow it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += accurate_matmul(a, b)


def accurate_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32 or wider. On CUDA the product of 16-bit matrices is not rounded to 16 bits on its way."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).to(accurate(a.dtype))
