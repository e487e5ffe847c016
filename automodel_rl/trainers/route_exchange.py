"""Routes of rollouts on their way from the ranks whose engines wrote them to the ranks that train on them.

Routes are the largest part of a rollout: layers x top-k numbers for every token. So each goes, once, to the ranks of
the data rank that got its sequence, and of all layers only those of the receiver's stages.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from automodel_rl.batch import RouterShape, Routes, read_routes
from automodel_rl.config.router_replay import RouterReplayConfig
from automodel_rl.data.loader import PackedStep
from automodel_rl.errors import RolloutError
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.rollout.groups import Group
from automodel_rl.rollout.protocol import Rollout

MISSING_METRIC = "rollout/routes_missing"
"""Share of the choices of experts that no engine told."""

Place = tuple[int, int]
"""An update, and a sequence's place in its global batch."""


def with_routes(
    groups: Sequence[Group], updates: Sequence[PackedStep], config: RouterReplayConfig, handle: ModelHandle
) -> tuple[list[PackedStep], dict[str, float]]:
    """The rows of every update with the routes of this rank's layers. A collective.

    Args:
        groups: that were packed.
        updates: what `pack_updates` made of them.
        config: what becomes of routes that are missing.
        handle: the mixture.

    Returns:
        The updates, and `MISSING_METRIC`.

    Raises:
        RolloutError: routes of a completion cannot be right, or are missing where that ends the run.
    """
    assert handle.router_shape is not None
    lengths, writers = {}, {}
    own: dict[Place, Routes] = {}
    problems = []
    for update in range(len(updates)):
        pairs = [(group, rollout) for group in groups[update :: len(updates)] for rollout in group.rollouts]
        for number, (group, rollout) in enumerate(pairs):
            place, num_prompt = (update, number), len(group.prompt.token_ids)
            lengths[place] = num_prompt + len(rollout.completion.token_ids)
            writers[place] = rollout.writer
            if rollout.writer == dist.get_rank():
                try:
                    own[place] = _read(rollout, num_prompt, handle.router_shape, config)
                except ValueError as problem:
                    problems.append(f"a completion of prompt {group.prompt.number}: {problem}")
    missing = sum(routes.num_missing() for routes in own.values())
    shares = gather_objects((problems[:1], missing), handle.layout.world_control)
    for rank, (found, _) in enumerate(shares):
        if found:
            raise RolloutError(f"the rollout engine of rank {rank} gave routes that cannot be followed: {found[0]}")
    arrived = _exchange(own, updates, lengths, writers, handle)
    packed = [
        dataclasses.replace(
            step,
            batches=[dataclasses.replace(b, routes=_of_row(update, b.order, arrived, handle)) for b in step.batches],
        )
        for update, step in enumerate(updates)
    ]
    total = sum(length - 1 for length in lengths.values()) * len(handle.router_shape.layers)
    return packed, {MISSING_METRIC: sum(number for _, number in shares) / max(total, 1)}


def _read(rollout: Rollout, num_prompt: int, shape: RouterShape, config: RouterReplayConfig) -> Routes:
    completion = rollout.completion
    routes = read_routes(completion.routes, num_prompt, len(completion.token_ids), shape)
    if config.on_missing == "error" and (missing := routes.num_missing()):
        raise ValueError(
            f"{missing} of {(len(routes) - 1) * len(shape.layers)} choices of experts are missing, and "
            "router_replay.on_missing=error: let the engine return them, or use live"
        )
    return routes


def _exchange(
    own: dict[Place, Routes],
    updates: Sequence[PackedStep],
    lengths: dict[Place, int],
    writers: dict[Place, int],
    handle: ModelHandle,
) -> dict[Place, Routes]:
    """The routes of the sequences in this rank's rows, of its layers."""
    assert handle.router_shape is not None
    top_k, world, rank = handle.router_shape.top_k, handle.layout.world_control, dist.get_rank()
    wanted = [(update, place) for update, step in enumerate(updates) for row in step.batches for place in row.order]
    asked = gather_objects((wanted, handle.router_layers), world)
    outgoing = [
        [own[place].select(layers).experts.numpy().ravel() for place in places if writers[place] == rank]
        for places, layers in asked
    ]
    incoming = [[place for place in wanted if writers[place] == source] for source in range(len(asked))]
    per_token = len(handle.router_layers) * top_k
    received = [sum(lengths[place] for place in places) * per_token for places in incoming]
    flat = _all_to_all([np.concatenate([np.empty(0, np.int16), *pieces]) for pieces in outgoing], received, world)
    arrived: dict[Place, Routes] = {}
    start = 0
    for place in (place for places in incoming for place in places):
        size = lengths[place] * per_token
        experts = flat[start : start + size].view(lengths[place], len(handle.router_layers), top_k)
        arrived[place] = Routes(handle.router_layers, experts)
        start += size
    return arrived


def _all_to_all(outgoing: Sequence[np.ndarray], received: Sequence[int], world: dist.ProcessGroup) -> torch.Tensor:
    """What all ranks have for this one, rank 0's first.

    Args:
        outgoing: int16, for every rank.
        received: how many numbers come from every rank.
        world: of all ranks.
    """
    sent = torch.from_numpy(np.concatenate(outgoing)).view(torch.uint8)  # gloo knows no int16
    result = torch.empty(sum(received), dtype=torch.int16)
    dist.all_to_all_single(
        result.view(torch.uint8), sent, [2 * n for n in received], [2 * piece.size for piece in outgoing], group=world
    )
    return result


def _of_row(update: int, order: Sequence[int], arrived: dict[Place, Routes], handle: ModelHandle) -> Routes | None:
    if not order:  # an empty row
        return None
    return Routes(handle.router_layers, torch.cat([arrived[update, place].experts for place in order]))
