"""What is read from the model's final hidden states for every token, as output functions."""

import functools
from typing import Any

import torch
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.losses import Readout
from automodel_rl.model.head import Head, OutputFn, accurate_matmul, add_matmul
from automodel_rl.model.logprobs import target_readout
from automodel_rl.model.mtp import mtp_readout


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


def read(readout: Readout, detaches_mtp: bool = True) -> OutputFn:
    """An output function that gives what a readout asks for, for every token: the columns of
    `TokenOutputs.from_columns`.

    Args:
        readout: what is read.
        detaches_mtp: whether the head gets no gradient of what the MTP layer says.
    """
    return functools.partial(_columns, readout=readout, detaches_mtp=detaches_mtp)


def _columns(hidden: Tensor, head: Head, microbatch: LocalMicrobatch, readout: Readout, detaches_mtp: bool) -> Tensor:
    if readout.scores:
        return token_scores(hidden, head)
    if not readout.mtp:
        return target_readout(hidden, head, microbatch, readout)
    of_model, of_mtp = hidden.chunk(2)
    columns = target_readout(of_model, head, microbatch, readout)
    return torch.cat([columns, mtp_readout(of_mtp, head, microbatch, readout, detaches_mtp)], dim=1)
