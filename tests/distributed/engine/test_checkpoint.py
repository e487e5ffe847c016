"""Checkpoints: a resumed run goes on bit for bit, on every kind of layout and of state."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import pack_row
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.engine import Engine
from automodel_rl.engine.checkpoint import load_checkpoint, save_checkpoint
from automodel_rl.errors import InputError
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.hf_read import persistent_tensors
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.torch_version import TORCH
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model


def make_engine(model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> Engine:
    handle = ModelHandle.from_pretrained(model, parallel, memory)
    return Engine(handle, OptimizerConfig(lr=1e-2, warmup_steps=3, decay="linear"), total_steps=8)


def train(engine: Engine, steps: range) -> None:
    for step in steps:
        rank = engine.handle.layout.data_rank
        engine.train_step([pack_row(make_sequences(2, 100 * step + 10 * rank + m)) for m in range(4)], sft_loss)


def tensors_of(engine: Engine) -> list[Tensor]:
    parts = engine.handle.parts
    return [local_tensor(tensor.detach()).clone() for part in parts for _, tensor in persistent_tensors(part)]


def stop_and_resume(folder: Path, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> bool:
    """Whether two steps, a checkpoint and two more are four steps. Checkpoints leave moments where they were."""
    whole = make_engine(model, parallel, memory)
    train(whole, range(2))
    save_checkpoint(whole, folder / "step_2", {}, {})
    assert (whole._offloaded is not None) == memory.offload_optimizer
    train(whole, range(2, 4))
    resumed = make_engine(model, parallel, memory)
    load_checkpoint(resumed, folder / "step_2")
    assert (resumed._offloaded is not None) == memory.offload_optimizer
    train(resumed, range(2, 4))
    return all(torch.equal(a, b) for a, b in zip(tensors_of(whole), tensors_of(resumed), strict=True))


SPLIT = pytest.mark.skipif(TORCH < (2, 13), reason="this torch cannot split the backward")


@pytest.mark.parametrize(
    ("family", "tied", "model", "sizes", "memory"),
    [
        ("qwen3", True, {}, {"pp": 2}, {}),
        pytest.param("qwen3", True, {}, {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}, {}, marks=SPLIT),
        ("qwen3", False, {}, {"dp_shard": 2}, {"offload_optimizer": True}),
        ("qwen3", True, {"lora": {"rank": 2}}, {"pp": 2}, {}),
        ("deepseek_v3", False, {"moe": {"bias_update_rate": 0.01}}, {"cp": 2, "ep": 2}, {}),
    ],
    ids=["pp2 tied", "V placement tied", "dp2 offloaded", "adapters", "routers' biases"],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    ranks: RankPool, tmp_path: Path, family: str, tied: bool, model: dict, sizes: dict, memory: dict
) -> None:
    save_tiny_model(tmp_path, family, tied=tied)
    config = ModelConfig(path=str(tmp_path), dtype="float32", **model)
    arguments = (tmp_path, config, ParallelConfig(**sizes), MemoryConfig(**memory))
    assert ranks(2).run(stop_and_resume, *arguments) == [True, True]


def save(folder: Path, parallel: ParallelConfig) -> None:
    engine = make_engine(ModelConfig(path=str(folder), dtype="float32"), parallel, MemoryConfig())
    save_checkpoint(engine, folder / "step_0", {}, {})


def load(folder: Path) -> str:
    engine = make_engine(ModelConfig(path=str(folder), dtype="float32"), ParallelConfig(), MemoryConfig())
    try:
        load_checkpoint(engine, folder / "step_0")
    except InputError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_of_another_number_of_ranks_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    ranks(2).run(save, tmp_path, ParallelConfig(pp=2))
    (message,) = ranks(1).run(load, tmp_path)
    assert message.endswith("was written by 2 ranks and this job has 1: resume with the same layout")
