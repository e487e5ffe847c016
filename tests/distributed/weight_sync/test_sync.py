"""After a sync every tensor of every generator is the trainer's, bit for bit: layouts, families, ways, buffers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.weight_sync.receiver import Receiver
from automodel_rl.weight_sync.sync import WeightSync
from tests.distributed.weight_sync.generators import (
    empty_homes,
    make_transport,
    own_tensors,
    put_together,
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
    """Names of tensors that differ after two weight syncs, with a training step between them."""
    dtype = getattr(torch, changes.get("dtype", "float32"))
    handle, engine = trained_model(folder, parallel)
    receiver = Receiver(empty_homes(folder, dtype))
    config = sync_config(checksum=True, **changes)
    way, _ = make_transport(transport, receiver, handle, config.timeout)
    sync = WeightSync(handle, way, config)
    wrong: list[str] = []
    for version in (1, 2):
        sync.send()
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


TIED = ("one rank", "pp2 interleaved", "fsdp2", "pp2 x tp2", "replicas")
"""Layouts with a tied embedding, in two copies where there is a pipeline."""


@pytest.mark.parametrize(
    ("layout", "tied"),
    [*((layout, False) for layout in LAYOUTS if layout != "one rank"), *((layout, True) for layout in TIED)],
)
def test_every_layout(ranks: RankPool, tmp_path: Path, layout: str, tied: bool) -> None:
    family, num_ranks, parallel = LAYOUTS[layout]
    save_tiny_model(tmp_path, family, tied=tied, dtype=torch.float32)
    transport = "collective" if tied else "local"
    for wrong in ranks(num_ranks).run(exchange, tmp_path, parallel, transport, {"dtype": "bfloat16"}):
        assert wrong == []


@pytest.mark.parametrize("way", ["local", "ipc", "collective"])
def test_ways_and_dtypes(ranks: RankPool, tmp_path: Path, way: str) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", dtype=torch.float32)
    parallel = {"pp": 2, "dp_shard": 2, "ep": 2}
    for changes in ({"dtype": "float32", "num_buffers": 1}, {"dtype": "float16", "buffer_mib": 1e-3, "num_buffers": 4}):
        assert ranks(4).run(exchange, tmp_path, parallel, way, changes) == [[]] * 4


def sync_adapters(folder: Path, parallel: dict[str, Any], adapters: str) -> tuple[dict[str, float], int]:
    """How far the generator's tensors are from what plain tensors give, and how many it got."""
    handle, _ = trained_model(folder, parallel, "float64", lora={"rank": 3, "alpha": 6.0})
    own = {name: parameter for part in handle.parts for name, parameter in part.named_parameters()}
    whole = {name: put_together(parameter, handle.layout) for name, parameter in own.items()}
    expected = {}
    for name, tensor in whole.items():
        if adapters == "alone" and ".lora_" in name:
            expected[name] = tensor.to(torch.float32)
        elif adapters == "merged" and ".lora_" not in name:
            layer = name.removesuffix(".weight")
            down, up = whole.get(f"{layer}.lora_A.weight"), whole.get(f"{layer}.lora_B.weight")
            expected[name] = (tensor if down is None or up is None else tensor + 2.0 * up @ down).to(torch.float32)
    expected = {n: t for stage in gather_objects(expected, handle.layout.pp_control) for n, t in stage.items()}
    receiver = Receiver({name: torch.full_like(tensor, -77.0) for name, tensor in expected.items()})
    config = sync_config(adapters=adapters, dtype="float32", checksum=True)
    way, _ = make_transport("local", receiver, handle, config.timeout)
    WeightSync(handle, way, config).send()
    # Merged in float64 on shards; the products are rounded where they are cast, so they may differ in the last bit.
    worst = {n: (receiver.homes[n] - t).abs().max().item() for n, t in expected.items()}
    return {name: value for name, value in worst.items() if value > 1e-7}, len(expected)


@pytest.mark.parametrize("adapters", ["merged", "alone"])
@pytest.mark.parametrize("parallel", [{"pp": 2}, {"dp_shard": 2}], ids=str)
def test_adapters(ranks: RankPool, tmp_path: Path, parallel: dict[str, Any], adapters: str) -> None:
    save_tiny_model(tmp_path, "qwen3")
    for wrong, count in ranks(2).run(sync_adapters, tmp_path, parallel, adapters):
        assert wrong == {}
        assert count == (2 * 7 * 4 if adapters == "alone" else 4 * 11 + 3)
