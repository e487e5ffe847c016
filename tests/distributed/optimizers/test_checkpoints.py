"""Checkpoints of optimizers whose states are not AdamW's move between layouts, and no other optimizer takes them."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from automodel_rl.batch import pack
from automodel_rl.checkpoint.load import load_checkpoint
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import MasterDtype, MemoryConfig
from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import gather_whole
from tests.checkpoints import save_checkpoint
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model


def make_engine(folder: Path, parallel: ParallelConfig, name: OptimizerName, master: MasterDtype = "auto") -> Engine:
    memory = MemoryConfig(offload_optimizer=True)
    handle = ModelHandle.from_pretrained(
        ModelConfig(path=str(folder), dtype="float64", master_dtype=master), parallel, memory
    )
    return Engine(handle, OptimizerConfig(name=name, lr=1e-2, decay="constant"))


def train(engine: Engine, number: int) -> float:
    """A step over the same global batch on every layout."""
    share = engine.handle.layout.data_share
    return engine.train_step(pack(make_sequences(8, number), 40, share=share), sft_loss).loss


def states_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Whole weights and optimizer state of this rank's stages, by name."""
    layout = engine.handle.layout
    with engine.moments_on_device():
        return {
            f"{kind} {name}": gather_whole(tensor, layout).clone()
            for name, parameter in engine.handle.named_parameters()
            for kind, tensor in {"weight": parameter, **engine.optimizer.state_of(parameter)}.items()
        }


def train_and_save(folder: Path, parallel: ParallelConfig, *of_engine: Any) -> tuple[dict, list[float]]:
    engine = make_engine(folder, parallel, *of_engine)
    for number in range(2):
        train(engine, number)
    save_checkpoint(engine, folder / "step_2", {}, {})
    return states_of(engine), [train(engine, number) for number in range(2, 4)]


def load_and_train(folder: Path, parallel: ParallelConfig, *of_engine: Any) -> tuple[dict, list[float]]:
    engine = make_engine(folder, parallel, *of_engine)
    load_checkpoint(engine, folder / "step_2")
    return states_of(engine), [train(engine, number) for number in range(2, 4)]


@pytest.mark.parametrize(
    ("family", "written", "read"),
    [("qwen3", {"pp": 2}, {"dp_shard": 2}), ("qwen3_moe", {"dp_shard": 2, "ep": 2}, {"pp": 2})],
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "master", "kind"),
    [
        ("muon", "auto", "momentum_buffer"),
        ("adamw_8bit", "auto", "exp_avg_sq_root"),
        ("adamw_8bit", "bfloat16", "exp_avg_sq_root"),
    ],
)
def test_a_checkpoint_goes_on_on_another_layout(
    ranks: RankPool, tmp_path: Path, name: str, master: str, kind: str, family: str, written: dict, read: dict
) -> None:
    save_tiny_model(tmp_path, family, tied=family == "qwen3", num_layers=2)
    saved = ranks(2).run(train_and_save, tmp_path, ParallelConfig(**written), name, master)
    loaded = ranks(2).run(load_and_train, tmp_path, ParallelConfig(**read), name, master)
    expected = {name: tensor for states, _ in saved for name, tensor in states.items()}
    found = {name: tensor for states, _ in loaded for name, tensor in states.items()}
    assert found.keys() == expected.keys()
    assert any(name.startswith(kind) for name in expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert loaded[0][1] == pytest.approx(saved[0][1], rel=1e-9)


def load_refused(folder: Path) -> str:
    try:
        load_and_train(folder, ParallelConfig(pp=2), "muon")
    except InputError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_of_another_optimizer_is_refused_in_one_line(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    ranks(2).run(train_and_save, tmp_path, ParallelConfig(dp_shard=2), "adamw")
    (line, other) = ranks(2).run(load_refused, tmp_path)
    assert line == other
    assert "\n" not in line
    assert line.startswith(f"{tmp_path / 'step_2'}: has no language.momentum_buffer.model.layers.0.")
    assert f"resume with its optimizer.name, one of {', '.join(get_args(OptimizerName))}" in line
