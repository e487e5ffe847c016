"""Simulates a pipeline step: when each rank is busy, and what it holds."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from automodel_rl.compat.pipelining import forward_ahead, planned_actions
from automodel_rl.config import ParallelConfig
from automodel_rl.parallel.pipeline.schedules import fill_up_to, stages_of_ranks

ENCODER = -1
"""Stage number of an encoder on a rank of its own."""

STEADY = 4
"""Microbatches per stage after which a schedule is periodic."""


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline.

    Attributes:
        length: duration, in the unit of the costs.
        busy: busy time of every rank, in the same unit.
        max_held: for every rank, the peak held by its stages for microbatches between forward and backward.
        num_microbatches: including empty ones.
    """

    length: float
    busy: list[float]
    max_held: list[float]
    num_microbatches: int

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time."""
        return 1 - sum(self.busy) / (len(self.busy) * self.length)


@functools.cache
def encoded_ahead(parallel: ParallelConfig, num_microbatches: int) -> int:
    """Returns for how many microbatches an encoder on its own ranks encodes media before the first backward.

    As many as the first stage has forwards before a microbatch's gradient exists, plus one that is encoded meanwhile.
    With fewer, the first stage and the encoder would wait for each other.
    """
    if parallel.pp == 1:
        return 2
    plan = planned_actions(parallel.schedule, parallel.pp, stages_of_ranks(parallel), num_microbatches)[0]
    forwards = most = 0
    for stage, kind, microbatch in plan:
        if stage == 0 and kind == "F":
            forwards += 1
        elif stage == 0 and kind in "BW":
            most = max(most, forwards - microbatch)
    return most + 1


def simulate(
    parallel: ParallelConfig,
    num_microbatches: int,
    forward: Sequence[float],
    held: Sequence[float],
    encoder: float | None = None,
) -> Timeline:
    """Simulates the schedule with backwards that cost twice the forward, and free communication.

    Args:
        forward: cost of a microbatch's forward in every stage.
        held: amount that every stage holds per microbatch between its forward and its backward.
        encoder: forward cost per microbatch of an encoder on a rank of its own, which comes last in the timeline and
            holds 1 per microbatch; None without one.
    """
    count = fill_up_to(num_microbatches, parallel) if parallel.pp > 1 else num_microbatches
    steady = fill_up_to(STEADY * parallel.num_stages, parallel) if parallel.pp > 1 else max(STEADY, count)
    if count > steady and parallel.schedule != "GPipe":  # GPipe holds all microbatches of a step
        # Each additional microbatch takes as long as its work on the busiest rank.
        short = simulate(parallel, steady, forward, held, encoder)
        length = short.length + (count - steady) * max(short.busy) / steady
        return Timeline(length, [count / steady * busy for busy in short.busy], short.max_held, count)
    if parallel.pp == 1 and encoder is None:
        total = 3 * forward[0] * count
        return Timeline(total, [total], [held[0]], count)
    plans = [forward_ahead(0, 1, count)]
    if parallel.pp > 1:
        plans = planned_actions(parallel.schedule, parallel.pp, stages_of_ranks(parallel), count)
    of_stage, holds = dict(enumerate(forward)), dict(enumerate(held))
    if encoder is not None:
        plans = [*plans, forward_ahead(ENCODER, min(count, encoded_ahead(parallel, count)), count)]
        of_stage[ENCODER], holds[ENCODER] = encoder, 1.0
    cost = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    done: dict[tuple[int, str, int], float] = {}
    free, busy = [0.0] * len(plans), [0.0] * len(plans)
    holding, most = [0.0] * len(plans), [0.0] * len(plans)
    place = [0] * len(plans)
    while any(place[rank] < len(plan) for rank, plan in enumerate(plans)):
        moved = False
        for rank, plan in enumerate(plans):
            while place[rank] < len(plan):
                stage, kind, microbatch = plan[place[rank]]
                ready = _ready(stage, kind, microbatch, parallel.num_stages, encoder is not None, done)
                if ready is None:
                    break
                work = cost[kind] * of_stage[stage]
                free[rank] = max(free[rank], ready) + work
                busy[rank] += work
                done[stage, kind, microbatch] = free[rank]
                if kind == "F":
                    holding[rank] += holds[stage]
                elif kind in "BW":
                    holding[rank] -= holds[stage]
                most[rank] = max(most[rank], holding[rank])
                place[rank] += 1
                moved = True
        assert moved, f"{parallel.schedule} waits for itself"
    return Timeline(max(free), busy, most, count)


def _ready(
    stage: int,
    kind: str,
    microbatch: int,
    num_stages: int,
    has_encoder: bool,
    done: dict[tuple[int, str, int], float],
) -> float | None:
    """Returns the time at which an action's dependency is done; None if not yet known."""
    if stage == ENCODER:
        return 0.0 if kind == "F" else next((done[k] for kind in "BW" if (k := (0, kind, microbatch)) in done), None)
    if kind == "F":
        return 0.0 if stage == 0 and not has_encoder else done.get((stage - 1, "F", microbatch))
    if kind == "W":
        return done.get((stage, "I", microbatch))
    if stage == num_stages - 1:
        return done.get((stage, "F", microbatch))
    return next((done[key] for k in "BI" if (key := (stage + 1, k, microbatch)) in done), None)
