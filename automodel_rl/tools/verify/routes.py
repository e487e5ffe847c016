"""Routes computed from a token's id, position and layer, so that they can be checked on any rank."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.batch import RouterShape, Routes, TokenSequence
from automodel_rl.batch.microbatch_scope import MicrobatchScope
from automodel_rl.batch.routes import MISSING
from automodel_rl.mixture.routers import RouterOutput, in_order
from automodel_rl.model.handle import ModelHandle

NUM_ROUTES = 97
"""Number of distinct routes. A prime, so that ids, positions and layers all matter."""


def route_of(ids: Tensor, positions: Tensor, layer: int, shape: RouterShape) -> Tensor:
    """Experts of every token in a layer, int64 [n, K]. About one token in `NUM_ROUTES` has none.

    Args:
        ids, positions: of the tokens, [n].
    """
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(NUM_ROUTES, shape.num_experts, generator=generator).argsort(1)[:, : shape.top_k]
    table[0] = MISSING
    return table[(ids.cpu() * 31 + positions.cpu() * 17 + layer * 7) % NUM_ROUTES]


def with_routes(sequence: TokenSequence, shape: RouterShape) -> TokenSequence:
    positions = torch.arange(len(sequence))
    experts = torch.stack([route_of(sequence.input_ids, positions, n, shape) for n in shape.layers], 1)
    experts[-1] = MISSING
    return dataclasses.replace(sequence, routes=Routes(shape.layers, experts.short()))


class RouteCheck:
    """Counts expert choices that differ from `route_of`, over all passes and layers of this rank of a mixture."""

    def __init__(self, handle: ModelHandle):
        self.shape, self.num_wrong, self.num_right = handle.router_shape, 0, 0
        self.place = handle.layout.tp_rank if handle.layout.parallel.sequence_parallel else 0
        for extras in handle.extras:
            for number, router in extras.router_watch.routers.items():
                router.register_forward_hook(functools.partial(self._compare, number, extras.microbatch_scope))

    def _compare(self, number: int, scope: MicrobatchScope, _: nn.Module, __: Any, output: RouterOutput) -> None:
        microbatch, chosen = scope.microbatch, in_order(output)[2].cpu()
        assert microbatch is not None
        assert self.shape is not None
        if not microbatch.is_real.any():  # an empty microbatch
            return
        own = slice(self.place * len(chosen), (self.place + 1) * len(chosen))
        wanted = route_of(microbatch.input_ids[own], microbatch.position_ids[own], number, self.shape)
        known = (
            microbatch.is_routed.cpu() & (wanted[:, 0] != MISSING) & (microbatch.targets[own].cpu() >= 0)
        )  # the last token has no route
        right = (chosen == wanted).all(1)[known]
        self.num_wrong += int((~right).sum())
        self.num_right += int(right.sum())
