"""Messages between the pipeline stages of an encoder: hidden states one way, their gradients the other.

Each stage runs forwards and backwards in the same order, so messages need no names. Two neighbours have a group for
hidden states and another for gradients, since NCCL runs the messages of a group one after the other.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.config.components import EncoderComponent
from automodel_rl.model.encoder_stages import StageLink
from automodel_rl.parallel.layout import own_group


@dataclass(frozen=True)
class Neighbour:
    """A stage next to this one. Each tp rank has its own there.

    Attributes:
        rank: its rank in the job.
        hidden, gradients: the groups of both ranks, for either kind of message.
    """

    rank: int
    hidden: dist.ProcessGroup
    gradients: dist.ProcessGroup


def neighbours(encoder: EncoderComponent) -> tuple[Neighbour | None, Neighbour | None]:
    """The stages before and after this rank's, if there are any. A collective of all ranks of the job."""
    places = torch.tensor(encoder.ranks).reshape(encoder.pp, -1)
    found: list[Neighbour | None] = [None, None]
    for stage in range(encoder.pp - 1):
        pairs = places[stage : stage + 2].T.tolist()
        hidden, gradients = own_group(pairs), own_group(pairs)
        if hidden is None or gradients is None:  # this rank has neither of the two stages
            continue
        for first, second in pairs:
            if dist.get_rank() == first:
                found[1] = Neighbour(second, hidden, gradients)
            elif dist.get_rank() == second:
                found[0] = Neighbour(first, hidden, gradients)
    return found[0], found[1]


Sent = list[tuple[Any, Tensor]]
"""Messages on their way, each with the tensor that must stay until it has left."""

MOST_SENT = 2
"""Number of backwards, or of forwards without one, whose messages may be on their way."""


@dataclass(frozen=True)
class StageActivations:
    """What came from and went to the neighbours in one forward, for its backward."""

    taken: list[Tensor]
    given: list[Tensor]
    sent: Sent


class StageMessages:
    """Sends what an encoder's stage gives and takes. A stage may have several: runners on one model take turns.

    Args:
        link: the stage's link, which each forward takes anew.
        before, after: its neighbours.
    """

    def __init__(self, link: StageLink, before: Neighbour | None, after: Neighbour | None):
        self.link, self.before, self.after = link, before, after
        self._kept: list[StageActivations] = []
        self._taken: list[Tensor] = []  # by the running forward
        self._leaving: deque[Sent] = deque()

    @property
    def is_first(self) -> bool:
        return self.before is None

    @property
    def is_last(self) -> bool:
        return self.after is None

    def finish(self) -> None:
        """Waits until all messages have left, at the end of a step."""
        for kept in self._kept:
            self._leaving.append(kept.sent)
        self._let_leave(most=0)
        self.clear()

    def clear(self) -> None:
        """Drops what is kept for backwards that will not come."""
        self._kept, self._taken, self._leaving = [], [], deque()
        self.link.given, self.link.late = [], []

    def begin_forward(self) -> None:
        """Lets the forward that follows take what comes from the stage before through these messages."""
        self.link.take = self._take

    def end_forward(self, given: list[Tensor]) -> None:
        """Sends what a forward gives to the next stage, and keeps what its backward needs."""
        sent = [] if self.after is None else _send([t.detach() for t in given], self.after.rank, self.after.hidden)
        if torch.is_grad_enabled():
            self._kept.append(StageActivations(self._taken, given, sent))
        else:
            self._leaving.append(sent)
            self._let_leave(MOST_SENT)
        self._taken = []

    def backward(self, embeddings: Tensor, gradient: Tensor) -> None:
        """Runs the backward of the oldest forward that has had none.

        Args:
            embeddings, gradient: the embeddings that the forward gave and their gradient; read on the last stage only.
        """
        kept = self._kept.pop(0)
        if self.after is None:
            embeddings.backward(gradient)
        elif self.link.gets_gradients:
            gradients = [self._received(tensor, self.after.rank, self.after.gradients) for tensor in kept.given]
            wanted = [tensor.requires_grad for tensor in kept.given]
            torch.autograd.backward([*itertools.compress(kept.given, wanted)], [*itertools.compress(gradients, wanted)])
        self._leaving.append(kept.sent)  # which the next stage has, if it has returned gradients
        if self.before is not None and self.link.returns_gradients:
            found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.taken]
            self._leaving[-1].extend(_send(found, self.before.rank, self.before.gradients))
        self._let_leave(MOST_SENT)

    def _take(self, like: Tensor) -> Tensor:
        assert self.before is not None
        tensor = self._received(like, self.before.rank, self.before.hidden)
        self._taken.append(tensor.requires_grad_(torch.is_grad_enabled() and self.link.returns_gradients))
        return tensor

    def _received(self, like: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        dist.recv(tensor, src=rank, group=group)
        return tensor

    def _let_leave(self, most: int) -> None:
        """Waits for the oldest messages, until so many backwards' or fewer are on their way."""
        while len(self._leaving) > most:
            for work, _ in self._leaving.popleft():
                work.wait()


def _send(tensors: Sequence[Tensor], rank: int, group: dist.ProcessGroup) -> Sent:
    whole = [tensor.contiguous() for tensor in tensors]
    return [(dist.isend(tensor, dst=rank, group=group), tensor) for tensor in whole]
