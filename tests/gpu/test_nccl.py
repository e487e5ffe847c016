"""Layouts over NCCL against plain transformers, in float64."""

from pathlib import Path

import pytest

from automodel_rl.config import ParallelConfig
from tests.distributed.parallel.test_parity import check
from tests.needs import need_gpus
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.gpu
LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(pp=2),
    ParallelConfig(dp_shard=2),
    ParallelConfig(pp=2, schedule="Interleaved1F1B", virtual_stages=2),
    ParallelConfig(pp=2, schedule="LoopedBFS", virtual_stages=2),
    ParallelConfig(tp=2),
    ParallelConfig(tp=2, sequence_parallel=True),
    ParallelConfig(cp=2),
    ParallelConfig(cp=2, ep=2),
    ParallelConfig(dp_shard=2, ep=2),
    ParallelConfig(pp=2, cp=2),
    ParallelConfig(pp=2, dp_shard=2, ep=2),
    ParallelConfig(cp=4),
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_float64_equals_transformers(ranks: RankPool, tmp_path: Path, parallel: ParallelConfig, tied: bool) -> None:
    need_gpus(parallel.world_size)
    family = "qwen3_moe" if parallel.ep > 1 else "qwen3"
    save_tiny_model(tmp_path, family, tied=tied)
    check(ranks, tmp_path, family, **parallel.model_dump())
