"""How many microbatches schedules run."""

import pytest

from automodel_rl.config import ParallelConfig
from automodel_rl.parallel.pipeline import schedules


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "given", "filled"),
    [("1F1B", 1, 1, 4), ("1F1B", 1, 9, 9), ("GPipe", 1, 1, 1), ("Interleaved1F1B", 2, 9, 10), ("DualPipeV", 2, 3, 8)],
)
def test_rows_are_filled_up_to_a_number_that_the_schedule_runs(
    schedule: str, virtual_stages: int, given: int, filled: int
) -> None:
    parallel = ParallelConfig(pp=4, schedule=schedule, virtual_stages=virtual_stages)
    assert schedules.fill_up_to(given, parallel) == filled
