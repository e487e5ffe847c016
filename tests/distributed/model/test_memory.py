"""Recomputation and offloading change memory, and no number."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from automodel_rl.batch import pack_row
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.engine import Engine
from automodel_rl.engine.offload import Offloaded
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.torch_version import TORCH
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

Numbers = tuple[list[float], list[torch.Tensor]]


def train(folder: Path, parallel: ParallelConfig, memory: MemoryConfig) -> Numbers:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64"), parallel, memory)
    engine = Engine(handle, OptimizerConfig(lr=1e-2, max_grad_norm=0.5, decay="constant"))
    rows = [pack_row(make_sequences(2, 10 * handle.layout.data_rank + m)) for m in range(4)]
    outputs = [engine.train_step(rows, sft_loss) for _ in range(3)]
    weights = [local_tensor(p.detach()).clone() for _, p in handle.named_parameters()]
    return [number for output in outputs for number in (output.loss, output.grad_norm)], weights


LAYOUTS = [
    ("qwen3", {"pp": 2}),
    ("qwen3_moe", {"cp": 2, "ep": 2}),
    pytest.param(
        "qwen3",
        {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2},
        marks=pytest.mark.skipif(TORCH < (2, 13), reason="this torch cannot split the backward"),
    ),
]


@pytest.mark.parametrize(
    "memory",
    [{"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}, {"offload_optimizer": True}],
)
@pytest.mark.parametrize(("family", "sizes"), LAYOUTS)
def test_numbers_stay(ranks: Callable[[int], RankPool], tmp_path: Path, family: str, sizes: dict, memory: dict) -> None:
    save_tiny_model(tmp_path, family)
    pool, parallel = ranks(2), ParallelConfig(**sizes)
    if memory.get("activation_checkpointing") == "selective" and parallel.schedule == "ZBVZeroBubble":
        with pytest.raises(AssertionError, match="goes through the backward twice"):
            pool.run(train, tmp_path, parallel, MemoryConfig(**memory))
        return
    plain = pool.run(train, tmp_path, parallel, MemoryConfig())
    changed = pool.run(train, tmp_path, parallel, MemoryConfig(**memory))
    for (numbers, weights), (other_numbers, other_weights) in zip(plain, changed, strict=True):
        assert numbers == other_numbers
        for weight, other in zip(weights, other_weights, strict=True):
            assert torch.equal(weight, other)


def test_offloaded_tensors_come_back_bit_for_bit() -> None:
    tensors = [torch.randn(100), torch.randn(7, 3, dtype=torch.float64)]
    expected = [tensor.clone() for tensor in tensors]
    waiting = Offloaded(tensors)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    waiting.restore()
    for tensor, before in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, before)
