"""Scores of a linear head for every token, from hidden states: the outputs of a sequence classifier.

Shape letters: T tokens, H hidden size, L outputs of the head.
"""

from typing import Any

import torch
from torch import Tensor

from automodel_rl.model.head import Head, accurate_matmul, add_matmul


def token_scores(hidden: Tensor, head: Head) -> Tensor:
    """hidden @ weight.T.

    Args:
        hidden: final hidden states [T, H]. Under tensor parallelism its gradient is this rank's summand.
        head: the linear head.

    Returns:
        [T, L], float64 for float64 hidden states, else float32; equal on all tp ranks.
    """
    return _LinearHead.apply(hidden, head.weight, head)


class _LinearHead(torch.autograd.Function):
    """A product whose gradient of the weight goes where the head says."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: Head) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.head = head
        return accurate_matmul(hidden, weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        head: Head = ctx.head
        own = (gradients[0] / head.copies).to(weight.dtype)
        d_weight = None
        if head.gradient is not None:
            add_matmul(head.gradient(), own.t(), hidden)
        elif ctx.needs_input_grad[1]:
            d_weight = accurate_matmul(own.t(), hidden).to(weight.dtype)
        return own @ weight, d_weight, None
