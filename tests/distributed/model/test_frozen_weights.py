"""Frozen weights are there once, in the dtype in which they are used, and nothing changes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from automodel_rl.batch import pack_microbatch
from automodel_rl.compat.fsdp import gathered_names
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.engine import Engine
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import local_tensor
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

STEPS = 2


def train_adapters(folder: Path, parallel: ParallelConfig, dtype: str) -> dict[str, Any]:
    """What is there of frozen weights in a training of adapters."""
    model = ModelConfig.model_validate({"path": str(folder), "dtype": dtype, "lora": LoraConfig(rank=4)})
    handle = ModelHandle.from_pretrained(model, parallel)
    engine = Engine(handle, OptimizerConfig(lr=1e-2, weight_decay=0.1, decay="constant"))
    parameters = dict(handle.named_parameters())
    frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
    before = {name: local_tensor(parameter).detach().clone() for name, parameter in frozen.items()}
    for step in range(STEPS):
        data_rank = handle.layout.data_rank
        engine.train_step([pack_microbatch(make_sequences(1 + data_rank, 10 * step + m)) for m in range(3)], sft_loss)
    gathered = {name for part in handle.parts for name in gathered_names(part)}
    return {
        "frozen dtypes": {parameter.dtype for parameter in frozen.values()},
        "trained dtypes": {p.dtype for p in parameters.values() if p.requires_grad},
        "sharded": {isinstance(parameter, DTensor) for parameter in frozen.values()},
        "gathered": bool(gathered & frozen.keys()),
        "moved": [name for name, p in frozen.items() if not torch.equal(local_tensor(p), before[name])],
    }


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize(
    "sizes", [{}, {"pp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "fsdp": "reshard"}, {"fsdp": "reshard"}], ids=str
)
def test_frozen_weights_stay_as_they_are_loaded(ranks: RankPool, tmp_path: Path, sizes: dict, family: str) -> None:
    save_tiny_model(tmp_path, family, dtype=torch.bfloat16)
    parallel = ParallelConfig(**sizes)
    is_sharded = parallel.fsdp_size > 1
    for found in ranks(parallel.world_size).run(train_adapters, tmp_path, parallel, "bfloat16"):
        accurate = {torch.float32} if family == "qwen3_next" else set()  # decays of linear attention
        assert found["frozen dtypes"] == {torch.bfloat16} | accurate
        assert found["trained dtypes"] == {torch.float32}
        assert found["sharded"] == {is_sharded}
        assert found["gathered"] == is_sharded
        assert found["moved"] == []
