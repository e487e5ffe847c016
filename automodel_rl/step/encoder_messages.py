"""Messages between the pipeline stages of an encoder: hidden states one way, their gradients the other.

Each stage runs forwards and backwards in the same order, so messages need no names. Two neighbours have a group for
hidden states and another for gradients, since NCCL runs the messages of a group one after the other.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.config.components import VisionComponent
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


def neighbours(vision: VisionComponent) -> tuple[Neighbour | None, Neighbour | None]:
    """The stages before and after this rank's, if there are any. A collective of all ranks of the job."""
    places = torch.tensor(vision.ranks).reshape(vision.pp, -1)
    found: list[Neighbour | None] = [None, None]
    for stage in range(vision.pp - 1):
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


@dataclass
class Passage:
    """What came from and went to the neighbours in one forward, for its backward."""

    taken: list[Tensor] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)


class StageMessages:
    """Sends what an encoder's stage gives and takes.

    Args:
        link: the stage's link.
        before, after: its neighbours.
    """

    def __init__(self, link: StageLink, before: Neighbour | None, after: Neighbour | None):
        self.link, self.before, self.after = link, before, after
        link.take = self._take
        self._passages: list[Passage] = []
        self._current = Passage()
        self._sent: list[tuple[Any, Tensor]] = []

    @property
    def is_first(self) -> bool:
        return self.before is None

    @property
    def is_last(self) -> bool:
        return self.after is None

    def finish(self) -> None:
        """Waits until all messages have left, at the end of a step."""
        for work, _ in self._sent:
            work.wait()
        self.clear()

    def clear(self) -> None:
        """Drops what is kept for backwards that will not come."""
        self._passages, self._current, self._sent = [], Passage(), []

    def end_forward(self, given: list[Tensor]) -> None:
        """Sends what a forward gives to the next stage, and keeps what its backward needs."""
        if self.after is not None:
            for tensor in given:
                self._send(tensor.detach(), self.after.rank, self.after.hidden)
        if torch.is_grad_enabled():
            self._passages.append(Passage(self._current.taken, given))
        self._current = Passage()

    def backward(self, embeddings: Tensor, gradient: Tensor) -> None:
        """Runs the backward of the oldest forward that has had none.

        Args:
            embeddings, gradient: the embeddings that the forward gave and their gradient; read on the last stage only.
        """
        passage = self._passages.pop(0)
        if self.after is None:
            embeddings.backward(gradient)
        elif self.link.takes_gradients:
            gradients = [self._received(tensor, self.after.rank, self.after.gradients) for tensor in passage.given]
            wanted = [tensor.requires_grad for tensor in passage.given]
            torch.autograd.backward(
                [*itertools.compress(passage.given, wanted)], [*itertools.compress(gradients, wanted)]
            )
        if self.before is not None and self.link.gives_gradients:
            for leaf in passage.taken:
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                self._send(gradient, self.before.rank, self.before.gradients)

    def _take(self, like: Tensor) -> Tensor:
        assert self.before is not None
        tensor = self._received(like, self.before.rank, self.before.hidden)
        self._current.taken.append(tensor.requires_grad_(torch.is_grad_enabled() and self.link.gives_gradients))
        return tensor

    def _received(self, like: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        dist.recv(tensor, src=rank, group=group)
        return tensor

    def _send(self, tensor: Tensor, rank: int, group: dist.ProcessGroup) -> None:
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, dst=rank, group=group), tensor))
