"""Plays a pipeline step on paper: when each rank is busy, and what it holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from automodel_rl.compat.pipelining import planned_actions
from automodel_rl.config import ParallelConfig
from automodel_rl.parallel.pipeline.schedules import SCHEDULES, fill_up_to

STEADY = 4
"""Microbatches for each stage after which a schedule repeats itself."""


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline.

    Attributes:
        length: duration of the step, in the unit of the costs.
        busy: time for which every rank is busy, in the same unit.
        most_held: for every rank, the most that its stages hold at a time for microbatches between forward and
            backward.
        num_microbatches: number of microbatches that run, empty ones included.
    """

    length: float
    busy: list[float]
    most_held: list[float]
    num_microbatches: int

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle."""
        return 1 - sum(self.busy) / (len(self.busy) * self.length)


def stages_of_ranks(parallel: ParallelConfig) -> list[list[int]]:
    """The stages of every pipeline rank."""
    pp, count = parallel.pp, parallel.num_stages
    if SCHEDULES[parallel.schedule].is_v:
        return [[rank, count - 1 - rank] for rank in range(pp)]
    return [list(range(rank, count, pp)) for rank in range(pp)]


def simulate(
    parallel: ParallelConfig, num_microbatches: int, forward: Sequence[float], held: Sequence[float]
) -> Timeline:
    """Plays the schedule with a backward that costs twice the forward, and messages that cost nothing.

    Args:
        parallel: sizes and schedule.
        num_microbatches: number of microbatches of a data rank.
        forward: cost of a microbatch's forward in every stage.
        held: what every stage holds for a microbatch between its forward and its backward.
    """
    count = fill_up_to(num_microbatches, parallel) if parallel.pp > 1 else num_microbatches
    steady = fill_up_to(STEADY * parallel.num_stages, parallel) if parallel.pp > 1 else count
    if count > steady and parallel.schedule != "GPipe":  # which holds all microbatches of a step
        # Each further microbatch takes as long as the busiest rank works for it.
        short = simulate(parallel, steady, forward, held)
        length = short.length + (count - steady) * max(short.busy) / steady
        return Timeline(length, [count / steady * busy for busy in short.busy], short.most_held, count)
    if parallel.pp == 1:
        total = 3 * forward[0] * count
        return Timeline(total, [total], [held[0]], count)
    plans = planned_actions(parallel.schedule, parallel.pp, stages_of_ranks(parallel), count)
    cost = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    done: dict[tuple[int, str, int], float] = {}
    free, busy = [0.0] * parallel.pp, [0.0] * parallel.pp
    holding, most = [0.0] * parallel.pp, [0.0] * parallel.pp
    place = [0] * parallel.pp
    while any(place[rank] < len(plan) for rank, plan in enumerate(plans)):
        moved = False
        for rank, plan in enumerate(plans):
            while place[rank] < len(plan):
                stage, kind, microbatch = plan[place[rank]]
                ready = _ready(stage, kind, microbatch, parallel.num_stages, done)
                if ready is None:
                    break
                work = cost[kind] * forward[stage]
                free[rank] = max(free[rank], ready) + work
                busy[rank] += work
                done[stage, kind, microbatch] = free[rank]
                if kind == "F":
                    holding[rank] += held[stage]
                elif kind in "BW":
                    holding[rank] -= held[stage]
                most[rank] = max(most[rank], holding[rank])
                place[rank] += 1
                moved = True
        assert moved, f"{parallel.schedule} waits for itself"
    return Timeline(max(free), busy, most, count)


def _ready(
    stage: int, kind: str, microbatch: int, num_stages: int, done: dict[tuple[int, str, int], float]
) -> float | None:
    """Time at which the action that this one waits for is done; None if that is not known yet."""
    if kind == "F":
        return 0.0 if stage == 0 else done.get((stage - 1, "F", microbatch))
    if kind == "W":
        return done.get((stage, "I", microbatch))
    if stage == num_stages - 1:
        return done.get((stage, "F", microbatch))
    return next((done[key] for k in "BI" if (key := (stage + 1, k, microbatch)) in done), None)
