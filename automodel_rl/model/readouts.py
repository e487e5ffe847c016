"""What is read from the model's final hidden states for every token, as output functions."""

import functools

import torch
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.losses import Readout
from automodel_rl.model.head import Head, OutputFn
from automodel_rl.model.logprobs import target_readout
from automodel_rl.model.mtp import mtp_readout
from automodel_rl.model.scores import token_scores


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
