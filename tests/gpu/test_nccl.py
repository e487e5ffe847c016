"""Layouts over NCCL against plain transformers, in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from automodel_rl.config import ParallelConfig
from tests.distributed.parity import Case
from tests.distributed.test_parity import assert_exact, differences
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.gpu
LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(pp=2),
    ParallelConfig(dp_shard=2),
    ParallelConfig(pp=2, schedule="Interleaved1F1B", virtual_stages=2),
    ParallelConfig(pp=2, schedule="LoopedBFS", virtual_stages=2),
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_float64_equals_transformers(
    ranks: Callable[[int], RankPool], tmp_path: Path, parallel: ParallelConfig, tied: bool
) -> None:
    if torch.cuda.device_count() < parallel.world_size:
        pytest.skip(f"needs {parallel.world_size} CUDA devices")
    save_tiny_model(tmp_path, tied=tied)
    assert_exact(differences(ranks, tmp_path, Case(parallel)))
