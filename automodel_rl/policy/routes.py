"""Routes of rows, and their transfer from the ranks whose generators wrote them to those that train on them.

Routes are the largest part of a rollout: layers x top-k numbers per token. They therefore bypass the program. They
are sent only to the data rank that trains on the row, and each of its ranks gets only the layers of its own stages.
"""

import itertools
from collections.abc import Collection, Sequence

import numpy as np
import torch
import torch.distributed as dist

from automodel_rl.batch import Routes, RoutesRef
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects


class RouteStore:
    """The routes on this rank.

    Attributes:
        arrived: routes of this rank's layers, for pieces of rows that it trains on.
    """

    def __init__(self, handle: ModelHandle):
        self.handle = handle
        self._own: dict[tuple[int, int], tuple[int, Routes]] = {}
        self._forgotten: set[int] = set()
        self.arrived: dict[RoutesRef, Routes] = {}
        self._ranks: list[tuple[int | None, tuple[int, ...]]] = []

    def keep(self, key: tuple[int, int], start: int, routes: Routes) -> None:
        """Keeps routes from this rank's generator. Thread-safe.

        Args:
            key: their name. Its first number is that of the rollouts they belong to.
            start: index of their first token.
            routes: routes of all layers.
        """
        if key[0] not in self._forgotten:  # a generator that was given up may still report some
            self._own[key] = start, routes

    def forget(self, rollouts: Collection[int]) -> None:
        """Drops the routes of rollouts with these numbers."""
        self._forgotten |= {*rollouts}
        for key in [*self._own]:  # another thread may be adding entries
            if key[0] in rollouts:
                del self._own[key]
        self.arrived = {at: routes for at, routes in self.arrived.items() if at.key[0] not in rollouts}

    def move(self, moves: Sequence[tuple[RoutesRef, int]]) -> None:
        """Sends routes to the ranks that train on their rows. A collective.

        Args:
            moves: pieces of rows, each with the row's data rank; the same on every rank.
        """
        assert self.handle.router_shape is not None
        layout, rank = self.handle.layout, dist.get_rank()
        if not self._ranks:
            here = (None if layout.is_outsider else layout.data_rank, tuple(self.handle.router_layers))
            self._ranks = gather_objects(here, layout.world_control)
        mine, layers = self._ranks[rank]
        pieces = [
            [self._piece(at).select(of).experts.numpy().ravel() for at, to in moves if (at.rank, to) == (rank, there)]
            for there, of in self._ranks
        ]
        top_k = self.handle.router_shape.top_k
        incoming = [[at for at, to in moves if (at.rank, to) == (source, mine)] for source in range(len(pieces))]
        sizes = [[(at.stop - at.start) * len(layers) * top_k for at in of] for of in incoming]
        flat = _all_to_all(pieces, [*map(sum, sizes)], layout.world_control)
        arrived = zip(itertools.chain(*incoming), flat.split([*itertools.chain(*sizes)]), strict=True)
        for at, piece in arrived:
            self.arrived[at] = Routes(layers, piece.view(at.stop - at.start, len(layers), top_k))

    def _piece(self, at: RoutesRef) -> Routes:
        start, routes = self._own[at.key]
        return Routes(routes.layers, routes.experts[at.start - start : at.stop - start])


def _all_to_all(
    pieces: Sequence[Sequence[np.ndarray]], received: Sequence[int], world: dist.ProcessGroup
) -> torch.Tensor:
    """Returns the int16 numbers that all ranks send to this one, rank 0's first.

    Args:
        pieces: arrays to send to each rank, int16.
        received: number of values from each rank.
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
