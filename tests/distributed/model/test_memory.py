"""Recomputation and offloading change memory, and no number."""

from pathlib import Path

import pytest
import torch

from automodel_rl.batch import pack_row
from automodel_rl.compat.versions import TORCH
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.engine import Engine
from automodel_rl.engine.offload import Offloaded
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.part_forward import layers_of
from automodel_rl.parallel.sharding import local_tensor
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

Numbers = tuple[list[float], list[torch.Tensor]]
MODES = {
    "full": MemoryConfig(activation_checkpointing="full"),
    "selective": MemoryConfig(activation_checkpointing="selective"),
    "offload": MemoryConfig(offload_optimizer=True),
}


def train(folder: Path, parallel: ParallelConfig, memory: MemoryConfig) -> tuple[Numbers, int, bool]:
    """What three steps compute, how often a linear layer runs in the last, and whether moments wait on the host."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64"), parallel, memory)
    engine = Engine(handle, OptimizerConfig(lr=1e-2, max_grad_norm=0.5, decay="constant"))
    rows = [pack_row(make_sequences(2, 10 * handle.layout.data_rank + m)) for m in range(4)]
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    layers_of(handle.parts[0])[0].self_attn.o_proj.register_forward_hook(count)
    outputs = []
    for _ in range(3):
        calls = 0
        outputs.append(engine.train_step(rows, sft_loss))
    weights = [local_tensor(p.detach()).clone() for _, p in handle.named_parameters()]
    numbers = [number for output in outputs for number in (output.loss, output.grad_norm)]
    return (numbers, weights), calls, engine._offloaded is not None


def compare_modes(folder: Path, parallel: ParallelConfig, modes: list[str]) -> None:
    (numbers, weights), plain_calls, _ = train(folder, parallel, MemoryConfig())
    for mode in modes:
        (other_numbers, other_weights), calls, is_offloaded = train(folder, parallel, MODES[mode])
        assert other_numbers == numbers, mode
        assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True)), mode
        assert calls == plain_calls if mode == "offload" else calls >= 2 * plain_calls, mode
        assert is_offloaded == (mode == "offload"), mode


@pytest.mark.parametrize(
    ("family", "sizes", "modes"),
    [
        ("qwen3", {"pp": 2}, list(MODES)),
        ("qwen3_moe", {"cp": 2, "ep": 2}, list(MODES)),
        pytest.param(
            "qwen3",
            {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2},
            ["full", "offload"],
            marks=pytest.mark.skipif(TORCH < (2, 13), reason="this torch cannot split the backward"),
        ),
    ],
)
def test_recomputation_and_offloading_take_place_and_change_no_number(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, modes: list[str]
) -> None:
    save_tiny_model(tmp_path, family)
    ranks(2).run(compare_modes, tmp_path, ParallelConfig(**sizes), modes)


def test_offloaded_tensors_come_back_bit_for_bit() -> None:
    tensors = [torch.randn(100), torch.randn(7, 3, dtype=torch.float64)]
    expected = [tensor.clone() for tensor in tensors]
    waiting = Offloaded(tensors)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    waiting.restore()
    for tensor, before in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, before)
