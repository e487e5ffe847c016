"""Over NCCL, too, a job of which one rank fails, is killed or hangs ends soon and says why."""

from pathlib import Path

import pytest
import torch

from tests.distributed.launch.test_failures import IN_LOSS, OURS, TORCHRUN, check_block

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]


@pytest.mark.parametrize(
    ("launcher", "way", "last_line"),
    [
        (OURS, "loss", f"error: rank 1: {IN_LOSS} failed: ValueError: planted in the loss"),
        (OURS, "killed", "error: rank 1 was killed by SIGKILL; the machine may have run out of memory"),
        (OURS, "hang", "error: rank 1 hangs: "),
        (TORCHRUN, "loss", f"error: rank 1: {IN_LOSS} failed: ValueError: planted in the loss"),
        (TORCHRUN, "killed", ""),
        (TORCHRUN, "hang", "error: rank 1 hangs: "),
    ],
)
def test_the_other_rank_ends_within_half_a_minute(
    tmp_path: Path, launcher: list[str], way: str, last_line: str
) -> None:
    check_block(tmp_path, launcher, way, 1, IN_LOSS, last_line)
