"""After a sync every tensor of every engine is the trainer's, bit for bit: layouts, families, ways, buffers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.weight_sync.receiver import Receiver
from automodel_rl.weight_sync.sync import WeightSync
from tests.distributed.weight_sync.engines import (
    empty_homes,
    make_transport,
    own_tensors,
    sync_config,
    train,
    trained_model,
)
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

INTERLEAVED = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("qwen3", 1, {}),
    "pp2 interleaved": ("qwen3", 2, INTERLEAVED),
    "tp2": ("gemma2", 2, {"tp": 2}),
    "fsdp2": ("qwen2", 2, {"dp_shard": 2}),
    "cp2": ("llama", 2, {"cp": 2}),
    "ep2": ("qwen3_moe", 2, {"dp_shard": 2, "ep": 2}),
    "pp2 x tp2": ("qwen3", 4, {"pp": 2, "tp": 2}),
    "fsdp2 x tp2": ("qwen3", 4, {"dp_shard": 2, "tp": 2}),
    "replicas": ("llama", 4, {"dp_shard": 2, "dp_replicate": 2}),
    "pp2 x ep2": ("deepseek_v3", 4, {"pp": 2, "dp_shard": 2, "ep": 2}),
    "ep2 of 4": ("mixtral", 4, {"dp_shard": 2, "cp": 2, "ep": 2}),
    "fsdp2, fused experts": ("gpt_oss", 2, {"dp_shard": 2}),
}


def exchange(folder: Path, parallel: dict[str, Any], transport: str, changes: dict[str, Any]) -> list[str]:
    """Names of tensors that differ after two updates, with a training step between them."""
    dtype = getattr(torch, changes.get("dtype", "float32"))
    handle, engine = trained_model(folder, parallel)
    receiver = Receiver(empty_homes(folder, dtype))
    config = sync_config(checksum=True, **changes)
    way, _ = make_transport(transport, receiver, handle, config.timeout)
    sync = WeightSync(handle, way, config)
    wrong: list[str] = []
    for version in (1, 2):
        sync.update()
        assert receiver.version == sync.version == version
        stages = gather_objects(own_tensors(handle, dtype), handle.layout.pp_control)
        expected = {name: tensor for stage in stages for name, tensor in stage.items()}
        assert expected.keys() == receiver.homes.keys()
        wrong += [name for name, tensor in expected.items() if not same_bits(tensor, receiver.homes[name])]
        train(handle, engine, seed=version)
    sync.disconnect()
    return wrong


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_layout(ranks: RankPool, tmp_path: Path, layout: str, tied: bool) -> None:
    family, num_ranks, parallel = LAYOUTS[layout]
    save_tiny_model(tmp_path, family, tied=tied, dtype=torch.float32)
    transport = "collective" if tied else "local"
    for wrong in ranks(num_ranks).run(exchange, tmp_path, parallel, transport, {"dtype": "bfloat16"}):
        assert wrong == []
