"""Routes of rows, and their way from the ranks whose generators wrote them to the ranks that train on them.

Routes are the largest part of a rollout: layers x top-k numbers for every token. So they never pass the program. They
go only to the data rank that trains on the row, and each of its ranks gets only the layers of its own stages.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from automodel_rl.batch import Routes
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects

Key = tuple[int, int]
"""The name of a row's routes."""

Move = tuple[int, Key, int, int]
"""The rank with a row's routes, their key, the row's tokens, and its data rank."""


class RouteStore:
    """The routes that this rank has.

    Args:
        handle: the model.

    Attributes:
        own: routes of all layers, of rows that this rank's generator wrote.
        arrived: routes of this rank's layers, of rows that this rank trains on.
    """

    def __init__(self, handle: ModelHandle):
        self.handle = handle
        self.own: dict[Key, Routes] = {}
        self.arrived: dict[Key, Routes] = {}
        self._ranks: list[tuple[int | None, tuple[int, ...]]] = []

    def forget(self) -> None:
        """Lets go of all routes."""
        self.own, self.arrived = {}, {}

    def move(self, moves: Sequence[Move]) -> None:
        """Sends routes to the ranks that train on their rows. A collective.

        Args:
            moves: the rows, the same on every rank.
        """
        assert self.handle.router_shape is not None
        layout, rank = self.handle.layout, dist.get_rank()
        if not self._ranks:
            here = (None if layout.is_guest else layout.data_rank, tuple(self.handle.router_layers))
            self._ranks = gather_objects(here, layout.world_control)
        mine, layers = self._ranks[rank]
        pieces = [
            [self.own[key].select(of).experts.numpy().ravel() for at, key, _, to in moves if (at, to) == (rank, there)]
            for there, of in self._ranks
        ]
        top_k = self.handle.router_shape.top_k
        incoming = [
            [(key, n) for at, key, n, to in moves if (at, to) == (source, mine)] for source in range(len(pieces))
        ]
        sizes = [[n * len(layers) * top_k for _, n in of] for of in incoming]
        flat = _all_to_all(pieces, [*map(sum, sizes)], layout.world_control)
        arrived = zip(itertools.chain(*incoming), flat.split([*itertools.chain(*sizes)]), strict=True)
        for (key, n), piece in arrived:
            self.arrived[key] = Routes(layers, piece.view(n, len(layers), top_k))


def _all_to_all(
    pieces: Sequence[Sequence[np.ndarray]], received: Sequence[int], world: dist.ProcessGroup
) -> torch.Tensor:
    """The numbers that all ranks send to this one, rank 0's first.

    Args:
        pieces: arrays to send to every rank, int16.
        received: how many numbers come from every rank.
        world: a process group of all ranks.
    """
    flat = np.concatenate([np.empty(0, np.int16), *(piece for of_rank in pieces for piece in of_rank)])
    result = np.empty(sum(received), np.int16)
    dist.all_to_all_single(
        torch.from_numpy(result.view(np.uint8)),  # gloo does not support int16
        torch.from_numpy(flat.view(np.uint8)),
        [2 * number for number in received],
        [2 * sum(piece.size for piece in of_rank) for of_rank in pieces],
        group=world,
    )
    return torch.from_numpy(result)
