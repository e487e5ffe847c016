"""How many microbatches of a step are a data rank's."""

import pytest

from automodel_rl.config import ParallelConfig
from automodel_rl.tools.plan import packing


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, 10),
        ({"dp_shard": 2}, 5),
        ({"dp_shard": 2, "dp_replicate": 2}, 3),
        ({"pp": 4, "dp_shard": 4}, 4),
        ({"dp_shard": 4, "tp": 2, "cp": 2}, 3),
    ],
    ids=str,
)
def test_data_ranks_share_the_microbatches_and_every_stage_has_one(sizes: dict[str, int], expected: int) -> None:
    assert packing.microbatches(packing.PlannedPacking(10, None), ParallelConfig(**sizes)) == expected
