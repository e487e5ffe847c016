"""Router replay over NCCL: every pass takes the routes' experts, and gives the numbers of plain transformers."""

from pathlib import Path

import pytest

from automodel_rl.config import ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.tools.verify.command import FLOAT64
from automodel_rl.tools.verify.comparison import Case
from tests.distributed.parallel.test_parity import assert_equal, differences
from tests.needs import need_gpus
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.gpu
LAYOUTS = [
    (ParallelConfig(), "full"),
    (ParallelConfig(pp=2), "full"),
    (ParallelConfig(pp=2, schedule="Interleaved1F1B", virtual_stages=2), "selective"),
    (ParallelConfig(cp=2, ep=2), "full"),
    (ParallelConfig(dp_shard=2, ep=2), "selective"),
    (ParallelConfig(pp=2, cp=2, ep=2), "full"),
]


@pytest.mark.parametrize(("parallel", "recomputed"), LAYOUTS, ids=str)
def test_replay_equals_transformers(ranks: RankPool, tmp_path: Path, parallel: ParallelConfig, recomputed: str) -> None:
    need_gpus(parallel.world_size)
    save_tiny_model(tmp_path, "qwen3_moe")
    memory = MemoryConfig(activation_checkpointing=recomputed)
    assert_equal(differences(ranks, tmp_path, Case(parallel, memory=memory, replay=True)), FLOAT64)
