"""Checkpoints: a resumed run goes on bit for bit, on every kind of layout and of state."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import pack, pack_microbatch
from automodel_rl.checkpoint.load import load_checkpoint
from automodel_rl.compat.versions import TORCH
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.engine import Engine
from automodel_rl.hf.read import persistent_tensors
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import gather_whole, local_tensor
from tests.checkpoints import begin_checkpoint, save_checkpoint
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model


def make_engine(model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> Engine:
    handle = ModelHandle.from_pretrained(model, parallel, memory)
    return Engine(handle, OptimizerConfig(lr=1e-2, warmup_steps=3, decay="linear"), total_steps=8)


def train(engine: Engine, steps: range) -> None:
    for step in steps:
        rank = engine.handle.layout.data_rank
        engine.train_step([pack_microbatch(make_sequences(2, 100 * step + 10 * rank + m)) for m in range(4)], sft_loss)


def tensors_of(engine: Engine) -> list[Tensor]:
    parts = engine.handle.parts
    return [local_tensor(tensor.detach()).clone() for part in parts for _, tensor in persistent_tensors(part)]


def stop_and_resume(folder: Path, model: ModelConfig, parallel: ParallelConfig, memory: MemoryConfig) -> bool:
    """Whether two steps, a checkpoint that is written during two more, and these again are four steps. Checkpoints
    leave moments where they were."""
    whole = make_engine(model, parallel, memory)
    train(whole, range(2))
    saver = begin_checkpoint(whole, folder / "step_2", {}, {})
    assert whole._moments.is_on_host == memory.offloads_optimizer
    train(whole, range(2, 4))
    assert saver.wait() is None
    resumed = make_engine(model, parallel, memory)
    load_checkpoint(resumed, folder / "step_2")
    assert resumed._moments.is_on_host == memory.offloads_optimizer
    train(resumed, range(2, 4))
    return all(torch.equal(a, b) for a, b in zip(tensors_of(whole), tensors_of(resumed), strict=True))


SPLIT = pytest.mark.skipif(TORCH < (2, 13), reason="this torch cannot split the backward")


@pytest.mark.parametrize(
    ("family", "tied", "model", "sizes", "memory"),
    [
        ("qwen3", True, {}, {"pp": 2}, {}),
        pytest.param("qwen3", True, {}, {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}, {}, marks=SPLIT),
        ("qwen3", False, {}, {"dp_shard": 2}, {"offload_optimizer": True}),
        ("qwen3", False, {}, {"dp_shard": 2, "fsdp": "reshard"}, {}),
        ("qwen3", True, {"lora": {"rank": 2}}, {"pp": 2}, {}),
        ("deepseek_v3", False, {"moe": {"bias_update_rate": 0.01}}, {"cp": 2, "ep": 2}, {}),
    ],
    ids=["pp2 tied", "V placement tied", "dp2 offloaded", "dp2 resharded", "adapters", "routers' biases"],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    ranks: RankPool, tmp_path: Path, family: str, tied: bool, model: dict, sizes: dict, memory: dict
) -> None:
    save_tiny_model(tmp_path, family, tied=tied)
    config = ModelConfig(path=str(tmp_path), dtype="float32", **model)
    arguments = (tmp_path, config, ParallelConfig(**sizes), MemoryConfig(**memory))
    assert ranks(2).run(stop_and_resume, *arguments) == [True, True]


def states_of(engine: Engine) -> dict[str, Tensor]:
    """Whole weights and moments of this rank's stages, by name."""
    layout = engine.handle.layout
    states = {}
    for name, parameter in engine.handle.named_parameters():
        states[name] = gather_whole(parameter, layout).clone()
        for kind, tensor in engine.optimizer.state_of(parameter).items():
            states[f"{name} {kind}"] = gather_whole(tensor, layout).clone()
    return states


def step_on_one_batch(engine: Engine, number: int) -> float:
    """A step over the same global batch on every layout."""
    layout = engine.handle.layout
    share = layout.data_share
    return engine.train_step(pack(make_sequences(8, number), 40, share=share), sft_loss).loss


def train_and_save(folder: Path, parallel: ParallelConfig) -> tuple[dict[str, Tensor], float]:
    engine = make_engine(ModelConfig(path=str(folder), dtype="float64"), parallel, MemoryConfig())
    for number in range(2):
        step_on_one_batch(engine, number)
    save_checkpoint(engine, folder / "step_2", {}, {"place": 7})
    return states_of(engine), step_on_one_batch(engine, 2)


def load_and_train(folder: Path, parallel: ParallelConfig) -> tuple[dict[str, Tensor], float, int, int]:
    engine = make_engine(ModelConfig(path=str(folder), dtype="float64"), parallel, MemoryConfig())
    _, rank_state = load_checkpoint(engine, folder / "step_2")
    return states_of(engine), step_on_one_batch(engine, 2), engine.step, rank_state["place"]


INTERLEAVED = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}
V_PLACED = {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("family", "tied", "written", "read"),
    [
        ("qwen3", True, INTERLEAVED, {}),
        ("qwen3", True, {}, INTERLEAVED),
        ("qwen3", True, INTERLEAVED, {"tp": 2, "dp_shard": 2}),
        ("qwen3", True, {"tp": 2, "dp_shard": 2}, INTERLEAVED),
        pytest.param("qwen3", True, {"dp_shard": 2, "dp_replicate": 2}, V_PLACED, marks=SPLIT),
        ("qwen3_moe", False, INTERLEAVED, {"cp": 2, "ep": 2}),
        ("qwen3_moe", False, {"dp_shard": 2, "ep": 2}, INTERLEAVED),
    ],
)
def test_a_checkpoint_goes_on_on_another_layout(
    ranks: RankPool, tmp_path: Path, family: str, tied: bool, written: dict, read: dict
) -> None:
    save_tiny_model(tmp_path, family, tied=tied)
    before, after = ParallelConfig(**written), ParallelConfig(**read)
    saved = ranks(before.world_size).run(train_and_save, tmp_path, before)
    loaded = ranks(after.world_size).run(load_and_train, tmp_path, after)
    expected = {name: tensor for states, _ in saved for name, tensor in states.items()}
    found = {name: tensor for states, *_ in loaded for name, tensor in states.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for _, loss, step, place in loaded:
        assert (step, place) == (3, 7)
        assert loss == pytest.approx(saved[0][1], rel=1e-9)
