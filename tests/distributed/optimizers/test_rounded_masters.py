"""Master weights in bfloat16 train the same on every kind of layout as in one process, bit for bit but for float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_rl.batch import pack
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.tools.verify.command import FLOAT32, judge
from automodel_rl.tools.verify.comparison import Case, compare
from tests.distributed.optimizers.test_checkpoints import train
from tests.distributed.optimizers.test_muon import OFFLOADED, different
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model, save_tiny_multimodal_model

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Sizes of which a half is whole blocks of 8-bit moments."""


@pytest.mark.parametrize(
    ("family", "tied", "sizes", "name", "widths"),
    [
        ("qwen2", False, {"dp_shard": 3}, "adamw", {}),  # rows of uneven numbers
        ("qwen3", True, {"pp": 2}, "adamw_8bit", {}),
        ("qwen3", True, {"tp": 2, "dp_shard": 2}, "adamw_8bit", WIDE),
        ("qwen3", False, {"tp": 2, "pp": 2, "sequence_parallel": True}, "adamw", {}),
        ("qwen3", False, {"cp": 2, "dp_replicate": 2, "fsdp": "reduce"}, "adamw", {}),
        ("qwen3_moe", False, {"dp_shard": 2, "ep": 2}, "adamw_8bit", {}),
        ("mistral", False, {"dp_shard": 2, "fsdp": "reshard"}, "adamw", {}),
    ],
    ids=str,
)
def test_layouts_equal_one_process(
    ranks: RankPool,
    tmp_path: Path,
    family: str,
    tied: bool,
    sizes: dict,
    name: OptimizerName,
    widths: dict[str, Any],
) -> None:
    save_tiny_model(tmp_path, family, tied=tied, num_layers=2, **widths)
    parallel = ParallelConfig(**sizes)
    case = Case(parallel, microbatches=(3, 1, 2), memory=OFFLOADED, optimizer=name, master_dtype="bfloat16")
    assert not different(ranks(parallel.world_size).run(compare, case, tmp_path, tmp_path)[0])


def test_routers_in_fp32_keep_wide_masters(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "hunyuan_v1_moe", num_layers=2)
    case = Case(ParallelConfig(dp_shard=2), microbatches=(3, 1, 2), master_dtype="bfloat16")
    assert all(row.is_equal for row in judge(ranks(2).run(compare, case, tmp_path, tmp_path)[0], FLOAT32))


def test_an_encoder_on_a_mesh_of_its_own_equals_one_process(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path, num_layers=2)
    components = ComponentsConfig.model_validate({"vision": {"ranks": "0-1", "tp": 2}, "language": {"ranks": 2}})
    case = Case(microbatches=(3, 2), components=components, master_dtype="bfloat16")
    assert not different(ranks(3).run(compare, case, tmp_path, tmp_path)[0])


def dtypes_in_bfloat16(folder: Path, parallel: ParallelConfig) -> list[set[torch.dtype]]:
    """Dtypes of weights, gradients and moments after two microbatches."""
    model = ModelConfig(path=str(folder), master_dtype="bfloat16")
    handle = ModelHandle.from_pretrained(model, parallel, MemoryConfig())
    engine = Engine(handle, OptimizerConfig(lr=1e-3, decay="constant"))
    found: list[set[torch.dtype]] = [set(), set(), set()]
    step = engine.optimizer.step

    def look(lr: float) -> None:
        for _, parameter in handle.named_parameters():
            assert parameter.grad is not None
            for dtypes, tensor in zip(found, (parameter, parameter.grad), strict=False):
                dtypes.add(tensor.dtype)
        step(lr)

    engine.optimizer.step = look  # type: ignore[method-assign]
    train(engine, 0)
    found[2] |= {tensor.dtype for tensor in engine.optimizer.moments()}
    return found


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_shard": 2, "fsdp": "reduce"}, {"pp": 2}], ids=str)
def test_gradients_and_moments_stay_wide(ranks: RankPool, tmp_path: Path, sizes: dict) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    found = ranks(2).run(dtypes_in_bfloat16, tmp_path, ParallelConfig(**sizes))
    assert found == [[{torch.bfloat16}, {torch.float32}, {torch.float32}]] * 2


def state_that_comes_back(folder: Path) -> None:
    """Gradients that wait for more of their kind keep their dtype when another state has the model's place."""
    engine = Engine(
        ModelHandle.from_pretrained(ModelConfig(path=str(folder), master_dtype="bfloat16"), ParallelConfig(dp_shard=2)),
        OptimizerConfig(name="adamw_8bit", lr=1e-3, decay="constant"),
    )
    first = engine.snapshot_state()
    microbatches = pack(make_sequences(8, 0), 40, share=engine.handle.layout.data_share)
    engine.forward_backward(microbatches, sft_loss)
    gradients = {name: gradient.clone() for name, gradient in engine.snapshot_state().gradients.items()}
    waiting = engine.snapshot_state()
    engine.restore_state(first)
    engine.restore_state(waiting)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    for name, gradient in engine.snapshot_state().gradients.items():
        assert torch.equal(gradient, gradients[name])


def test_gradients_come_back_as_they_were(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=1)
    ranks(2).run(state_that_comes_back, tmp_path)


def refusal_of_muon(folder: Path) -> str:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), master_dtype="bfloat16"))
    with pytest.raises(InputError) as refused:
        Engine(handle, OptimizerConfig(name="muon"))
    return str(refused.value)


def test_muon_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=1)
    assert "its steps do not round weights" in ranks(1).run(refusal_of_muon, tmp_path)[0]
