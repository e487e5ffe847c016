"""Sends routes of rollouts from the ranks whose generators wrote them to the ranks that train on them.

Routes are the largest part of a rollout: layers x top-k numbers for every token. So they go only to the data rank that
trains on the sequence, and each of its ranks gets only the layers of its own stages.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from automodel_rl.batch import Routes, join_routes
from automodel_rl.data.loader import PackedStep
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.rollout.groups import Group
from automodel_rl.trainers.policy_batches import rollouts_of_optimizer_step

MISSING_METRIC = "rollout/routes_missing"
"""Metric: the share of the choices of experts that no generator reported."""

Place = tuple[int, int]
"""The number of an optimizer step, and a sequence's place in its global batch."""


def with_routes(
    groups: Sequence[Group], optimizer_steps: Sequence[PackedStep], handle: ModelHandle
) -> tuple[list[PackedStep], dict[str, float]]:
    """Adds the routes of this rank's layers to the microbatches of every optimizer step. A collective.

    Args:
        groups: the groups that were packed; each rank has the routes of the completions that its generator wrote.
        optimizer_steps: the result of `pack_optimizer_steps` for these groups.
        handle: the mixture.

    Returns:
        The optimizer steps, and `MISSING_METRIC`.
    """
    assert handle.router_shape is not None
    sequences = {
        (optimizer_step, place): (len(rollout.prompt_of(group.prompt)) + len(rollout.completion.token_ids), rollout)
        for optimizer_step in range(len(optimizer_steps))
        for place, (group, rollout) in enumerate(
            rollouts_of_optimizer_step(groups, optimizer_step, len(optimizer_steps))
        )
    }
    lengths = {place: length for place, (length, _) in sequences.items()}
    writers = {place: rollout.writer for place, (_, rollout) in sequences.items()}
    own = {place: r.completion.routes for place, (_, r) in sequences.items() if r.writer == dist.get_rank()}
    missing = sum(gather_objects(sum(r.num_missing() for r in own.values()), handle.layout.world_control))
    arrived = _exchange(own, optimizer_steps, lengths, writers, handle)
    packed = [
        dataclasses.replace(
            step,
            microbatches=[
                dataclasses.replace(
                    microbatch, routes=join_routes([arrived[optimizer_step, place] for place in microbatch.order])
                )
                for microbatch in step.microbatches
            ],
        )
        for optimizer_step, step in enumerate(optimizer_steps)
    ]
    total = sum(length - 1 for length in lengths.values()) * len(handle.router_shape.layers)
    return packed, {MISSING_METRIC: missing / max(total, 1)}


def _exchange(
    own: dict[Place, Routes],
    optimizer_steps: Sequence[PackedStep],
    lengths: dict[Place, int],
    writers: dict[Place, int],
    handle: ModelHandle,
) -> dict[Place, Routes]:
    """The routes of the sequences in this rank's microbatches, for this rank's layers."""
    assert handle.router_shape is not None
    top_k, world, rank = handle.router_shape.top_k, handle.layout.world_control, dist.get_rank()
    wanted = [
        (optimizer_step, place)
        for optimizer_step, step in enumerate(optimizer_steps)
        for microbatch in step.microbatches
        for place in microbatch.order
    ]
    asked = gather_objects((wanted, handle.router_layers), world)
    pieces = [
        [own[place].select(layers).experts.numpy().ravel() for place in places if writers[place] == rank]
        for places, layers in asked
    ]
    incoming = [[place for place in wanted if writers[place] == source] for source in range(len(asked))]
    per_token = len(handle.router_layers) * top_k
    sizes = [[lengths[place] * per_token for place in places] for places in incoming]
    flat = _all_to_all(pieces, [sum(of_rank) for of_rank in sizes], world)
    arrived = zip(itertools.chain(*incoming), flat.split([*itertools.chain(*sizes)]), strict=True)
    layers = handle.router_layers
    return {place: Routes(layers, piece.view(lengths[place], len(layers), top_k)) for place, piece in arrived}


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
