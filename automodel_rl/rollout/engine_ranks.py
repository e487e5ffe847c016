"""The ranks whose GPUs one vLLM uses together: the first of them leads it, the others lend theirs and write nothing."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from automodel_rl.errors import InputError
from automodel_rl.generator_messages import (
    Begin,
    Commit,
    Committed,
    GiveUp,
    InitTransfer,
    LoadAdapter,
    Loaded,
    LoadWeights,
    Message,
    Ready,
    Request,
)
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import own_group
from automodel_rl.rollout.protocol import Completion, OnFinished, do_nothing


@dataclass(frozen=True)
class EngineRanks:
    """Consecutive ranks of a machine that share one generator.

    Attributes:
        size: number of the ranks, `rollout.vllm.tensor_parallel`.
        group: a gloo group of them; None if each rank has a generator of its own.
    """

    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, size: int) -> "EngineRanks":
        """This rank's engine. A collective of all ranks.

        Args:
            size: number of ranks that share a generator.

        Raises:
            InputError: the ranks of a machine are not whole groups of this size.
        """
        if size == 1:
            return cls()
        world = dist.get_world_size()
        on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if on_machine % size:
            raise InputError(
                f"rollout.vllm.tensor_parallel={size}: the {on_machine} ranks on a machine are not whole groups of "
                "this size: use a divisor of their number"
            )
        return cls(size, own_group([[*range(first, first + size)] for first in range(0, world, size)], "gloo"))

    @property
    def leads(self) -> bool:
        """Whether this rank's generator writes."""
        return dist.get_rank() % self.size == 0

    @property
    def writers(self) -> range:
        """The ranks whose generators write."""
        return range(0, dist.get_world_size(), self.size)

    def deal(self, count: int) -> list[list[int]]:
        """Deals places to the writers in turn: the places of each rank."""
        shares: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        for number, rank in enumerate(self.writers):
            shares[rank] = [*range(number, count, len(self.writers))]
        return shares

    def meet(self) -> None:
        """Waits for the other ranks of the engine."""
        if self.group is not None:
            gather_objects(None, self.group)


class Bystander:
    """The generator and the channel of a rank whose GPU another rank's generator uses: it agrees with everything."""

    num_workers = 0

    def __init__(self) -> None:
        self._coming: int | None = None
        self._answers: deque[Message] = deque()

    def submit(
        self, requests: Sequence[Request], on_finished: OnFinished = do_nothing
    ) -> Callable[[], list[Completion]]:
        assert not requests
        return list

    def close(self) -> None:
        """Does nothing: no process was started."""

    def send(self, message: Message) -> None:
        match message:
            case Begin(version):
                self._coming = version
            case InitTransfer():
                self._answers.append(Ready())
            case LoadWeights():
                self._answers.append(Loaded())
            case Commit():
                self._answers.append(Committed(self._coming))
            case GiveUp():
                self._answers.clear()
            case LoadAdapter(version):
                self._answers.append(Committed(version))

    def ready(self) -> bool:
        return bool(self._answers)

    def receive(self) -> Message:
        return self._answers.popleft()
