"""Output functions that read per-token values from final hidden states."""

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
    """Returns hidden @ weight.T of a linear head, [T, L], float64 for float64 hidden states [T, H], else float32;
    equal on all tp ranks. Under tensor parallelism the gradient of `hidden` is this rank's summand."""
    return _LinearHead.apply(hidden, head.weight, head)


class _LinearHead(torch.autograd.Function):
    """Product whose weight gradient goes to `Head.gradient` if there is one, else to autograd."""

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
    """Returns an output function that computes the columns of `TokenOutputs.from_columns`. With `detaches_mtp` the
    MTP layer's log-probabilities send no gradient to the head."""
    return functools.partial(_columns, readout=readout, detaches_mtp=detaches_mtp)


def _columns(hidden: Tensor, head: Head, microbatch: LocalMicrobatch, readout: Readout, detaches_mtp: bool) -> Tensor:
    if readout.scores:
        return token_scores(hidden, head)
    if not readout.mtp:
        return target_readout(hidden, head, microbatch, readout)
    of_model, of_mtp = hidden.chunk(2)
    columns = target_readout(of_model, head, microbatch, readout)
    return torch.cat([columns, mtp_readout(of_mtp, head, microbatch, readout, detaches_mtp)], dim=1)
