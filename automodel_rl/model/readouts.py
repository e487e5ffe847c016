"""What is read from the model's final hidden states for every token, as output functions."""

import functools

from torch import Tensor

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.losses import Readout
from automodel_rl.model.head import Head, OutputFn
from automodel_rl.model.logprobs import target_readout
from automodel_rl.model.scores import token_scores


def read(readout: Readout) -> OutputFn:
    """An output function that gives what a readout asks for, for every token: the columns of
    `TokenOutputs.from_columns`."""
    return functools.partial(_columns, readout=readout)


def _columns(hidden: Tensor, head: Head, microbatch: LocalMicrobatch, readout: Readout) -> Tensor:
    return token_scores(hidden, head) if readout.scores else target_readout(hidden, head, microbatch, readout)
