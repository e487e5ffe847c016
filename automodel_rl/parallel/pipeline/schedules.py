"""Requirements of torch's pipeline schedules: stages per rank, their placement, and numbers of microbatches."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from automodel_rl.compat.versions import TORCH
from automodel_rl.config import ParallelConfig


@dataclass(frozen=True)
class ScheduleRule:
    """The requirements of a schedule.

    Attributes:
        min_virtual_stages, max_virtual_stages: number of stages per rank (None: any number).
        is_v: whether rank r has stages r and 2 * pp - 1 - r, so that rank 0 has both the first and the last.
            Otherwise it has stages r, r + pp, ...
        splits_backward: whether gradients of inputs and of weights are computed at different times.
        runs: (microbatches, pp, stages) -> whether the schedule can run that many microbatches.
    """

    min_virtual_stages: int
    max_virtual_stages: int | None
    is_v: bool
    splits_backward: bool
    runs: Callable[[int, int, int], bool]


def _any(num_microbatches: int, pp: int, num_stages: int) -> bool:
    return True


def _one_for_each_stage(num_microbatches: int, pp: int, num_stages: int) -> bool:
    return num_microbatches >= num_stages


def _whole_rounds(num_microbatches: int, pp: int, num_stages: int) -> bool:
    return num_microbatches % max(1, num_microbatches // pp) == 0


SCHEDULES = {
    "1F1B": ScheduleRule(1, 1, False, False, _one_for_each_stage),
    "GPipe": ScheduleRule(1, 1, False, False, _any),
    "Interleaved1F1B": ScheduleRule(2, None, False, False, _whole_rounds),
    "LoopedBFS": ScheduleRule(2, None, False, False, _any),
    "InterleavedZeroBubble": ScheduleRule(2, None, False, True, _whole_rounds),
    "ZBVZeroBubble": ScheduleRule(2, 2, True, True, _any),
    "DualPipeV": ScheduleRule(2, 2, True, True, _one_for_each_stage),
}
"""The schedules by torch's names. `runs` matches the checks in torch 2.11's and 2.13's constructors."""


def fill_up_to(num_microbatches: int, parallel: ParallelConfig) -> int:
    """Returns the smallest number of microbatches, at least the given one, that the schedule can run."""
    runs = SCHEDULES[parallel.schedule].runs
    while not runs(num_microbatches, parallel.pp, parallel.num_stages):
        num_microbatches += 1
    return num_microbatches


def stages_of_ranks(parallel: ParallelConfig) -> tuple[tuple[int, ...], ...]:
    """Returns the stages of every pipeline rank."""
    pp, count = parallel.pp, parallel.num_stages
    if SCHEDULES[parallel.schedule].is_v:
        return tuple((rank, count - 1 - rank) for rank in range(pp))
    return tuple(tuple(range(rank, count, pp)) for rank in range(pp))


def refuse_schedule(parallel: ParallelConfig) -> str | None:
    """Returns why the schedule cannot run with this many stages per rank, or with this torch; None if it can."""
    rule = SCHEDULES[parallel.schedule]
    most = rule.max_virtual_stages
    if parallel.virtual_stages < rule.min_virtual_stages or (most is not None and parallel.virtual_stages > most):
        numbers = f"{most}" if rule.min_virtual_stages == most else f"at least {rule.min_virtual_stages}"
        return (
            f"parallel.virtual_stages={parallel.virtual_stages}: {parallel.schedule} has {numbers} on each rank: "
            f"use virtual_stages={rule.min_virtual_stages}"
        )
    if rule.splits_backward and TORCH < (2, 13):
        return (
            f"parallel.schedule={parallel.schedule} needs torch 2.13, but this is {version('torch')}: older versions "
            "cannot split the backward of a function with its own backward, as log-probabilities have; use "
            "Interleaved1F1B"
        )
    return None
