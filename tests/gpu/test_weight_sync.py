"""Weights over NCCL and CUDA IPC into generators' processes: every tensor's checksum is that of the trainer's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from automodel_rl.errors import WeightSyncError
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.weight_sync.checksum import checksum
from automodel_rl.weight_sync.collective import CollectiveTransport
from automodel_rl.weight_sync.ipc import IpcTransport
from automodel_rl.weight_sync.local import LocalTransport
from automodel_rl.weight_sync.receiver import Receiver
from automodel_rl.weight_sync.sync import WeightSync
from automodel_rl.weight_sync.transport import Transport
from tests.distributed.weight_sync.generators import (
    empty_homes,
    own_tensors,
    receiving_process,
    sync_config,
    train,
    trained_model,
)
from tests.needs import need_gpus
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.gpu
DENSE: list[dict[str, Any]] = [
    {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2},
    {"tp": 2},
    {"dp_shard": 2},
    {"cp": 2},
]
MIXTURE: list[dict[str, Any]] = [{"dp_shard": 2, "ep": 2}, {"pp": 2}]
FOUR: list[dict[str, Any]] = [{"pp": 2, "tp": 2}, {"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}]


def sync_all(folder: Path, layouts: list[dict[str, Any]], way: str, first_generator: int | None) -> list[str]:
    """Names of tensors that differ after syncs on one layout after the other, into the same generator."""
    wrong: list[str] = []
    generator = None
    for parallel in layouts:
        handle, trainer = trained_model(folder, parallel)
        device, config = handle.layout.device, sync_config(checksum=True, num_buffers=3)
        if way != "local" and generator is None:
            first = dist.get_rank() if first_generator is None else first_generator + dist.get_rank()
            generator = receiving_process(folder, device="cuda:0", visible=str(first))
        transport: Transport
        if way == "local":
            transport = LocalTransport(Receiver(empty_homes(folder, torch.float32, device)), device)
        elif way == "ipc":
            transport = IpcTransport(generator, device, config.timeout)
        else:
            transport = CollectiveTransport(generator, handle, config.timeout)
        sync = WeightSync(handle, transport, config)
        for seed in (1, 2):
            sync.send()  # compares what was packed with what the generator has
            stages = gather_objects(
                {
                    name: int(checksum(tensor.contiguous()))
                    for name, tensor in own_tensors(handle, torch.float32).items()
                },
                handle.layout.pp_control,
            )
            expected = {name: total for stage in stages for name, total in stage.items()}
            packed = sync.producer.checksums()
            wrong += [name for name in expected if packed[name] != expected[name]]
            train(handle, trainer, seed)
        sync.disconnect()
    if generator is not None:
        generator.close()
    return wrong


@pytest.mark.parametrize("way", ["local", "ipc"])
@pytest.mark.parametrize(("family", "layouts"), [("qwen3", DENSE), ("qwen3_moe", MIXTURE)])
def test_two_ranks_with_generators_on_their_devices(
    ranks: RankPool, tmp_path: Path, way: str, family: str, layouts: list[dict[str, Any]]
) -> None:
    need_gpus(2)
    save_tiny_model(tmp_path, family, tied=way == "ipc" and family == "qwen3", dtype=torch.float32)
    assert ranks(2).run(sync_all, tmp_path, layouts, way, None) == [[], []]


def test_one_rank_with_a_generator_on_another_device(ranks: RankPool, tmp_path: Path) -> None:
    need_gpus(2)
    save_tiny_model(tmp_path, "qwen3", dtype=torch.float32)
    assert ranks(1).run(sync_all, tmp_path, [{}], "collective", 1) == [[]]


@pytest.mark.parametrize(("family", "layouts"), [("qwen3", DENSE), ("qwen3_moe", MIXTURE)])
def test_two_ranks_with_generators_on_two_other_devices(
    ranks: RankPool, tmp_path: Path, family: str, layouts: list[dict[str, Any]]
) -> None:
    need_gpus(4)
    save_tiny_model(tmp_path, family, tied=family == "qwen3", dtype=torch.float32)
    assert ranks(2).run(sync_all, tmp_path, layouts, "collective", 2) == [[], []]


def test_four_ranks_with_generators_on_their_devices(ranks: RankPool, tmp_path: Path) -> None:
    need_gpus(4)
    save_tiny_model(tmp_path, "qwen3", dtype=torch.float32)
    assert ranks(4).run(sync_all, tmp_path, FOUR, "ipc", None) == [[]] * 4


def lose_the_generator(folder: Path) -> str:
    handle, _ = trained_model(folder, {})
    config = sync_config(timeout=20.0)
    generator = receiving_process(folder, "dies", "cuda:0", visible="1")
    try:
        WeightSync(handle, CollectiveTransport(generator, handle, config.timeout), config).send()
    except WeightSyncError as error:
        torch.cuda.synchronize()  # nothing of the broken link is left on the device
        return str(error)
    return ""


def test_an_generator_that_dies_under_nccl_is_noticed(ranks: RankPool, tmp_path: Path) -> None:
    need_gpus(2)
    save_tiny_model(tmp_path, "qwen3", dtype=torch.float32)
    (message,) = ranks(1).run(lose_the_generator, tmp_path)
    assert "its process exited with code -9" in message
