"""A checkpoint that is copied from the device beside the computation is the one of its step."""

from pathlib import Path

import pytest

from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from tests.distributed.checkpoint.test_state import stop_and_resume
from tests.needs import need_gpus
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("sizes", "memory"),
    [({}, {}), ({}, {"offload_optimizer": True}), ({"pp": 2}, {}), ({"dp_shard": 2}, {"offload_optimizer": True})],
    ids=["one GPU", "one GPU offloaded", "pp2", "dp2 offloaded"],
)
def test_training_goes_on_while_it_is_written(ranks: RankPool, tmp_path: Path, sizes: dict, memory: dict) -> None:
    parallel = ParallelConfig(**sizes)
    need_gpus(parallel.world_size)
    # Large enough that copying takes longer than a kernel.
    save_tiny_model(tmp_path, vocab_size=20_000, hidden_size=1024, intermediate_size=2048, head_dim=64)
    config = ModelConfig(path=str(tmp_path), dtype="float32")
    results = ranks(parallel.world_size).run(stop_and_resume, tmp_path, config, parallel, MemoryConfig(**memory))
    assert all(results)
