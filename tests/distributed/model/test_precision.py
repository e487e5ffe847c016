"""What bfloat16 is for, and what stays in float32: master weights, moments, and sums of gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automodel_rl import Engine, Microbatch, ModelHandle, OptimizerConfig, ParallelConfig, Readout, sft_loss
from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig
from automodel_rl.parallel.sharding import gather_whole, local_tensor
from automodel_rl.step.runner import StepRunner
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

NUM_ROWS = 8
STEPS, LR = 20, 1e-5


def make_microbatches(data_rank: int = 0, num_data_ranks: int = 1) -> list[Microbatch]:
    return [pack_microbatch(make_sequences(2 + i % 3, seed=i)) for i in range(NUM_ROWS)][data_rank::num_data_ranks]


def load(folder: Path, parallel: ParallelConfig) -> ModelHandle:
    return ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="bfloat16"), parallel)


def gradients(handle: ModelHandle, microbatches: list[Microbatch], counts: dict) -> dict[str, Tensor]:
    StepRunner(handle).forward_backward(microbatches, sft_loss, Readout(), counts)
    found = {name: gather_whole(p.grad, handle.layout).cpu().clone() for name, p in handle.named_parameters()}
    handle.zero_grad()
    return found


def summed(folder: Path, parallel: ParallelConfig) -> dict[str, Tensor]:
    """Gradients over all microbatches."""
    handle = load(folder, parallel)
    microbatches = make_microbatches(handle.layout.data_rank, parallel.num_data_ranks)
    return gradients(handle, microbatches, StepRunner(handle).global_batch(microbatches).counts)


def one_by_one(folder: Path) -> dict[str, Tensor]:
    """Gradients of every microbatch by itself, added up in float64."""
    handle = load(folder, ParallelConfig())
    counts = StepRunner(handle).global_batch(make_microbatches()).counts
    of_microbatches = [gradients(handle, [microbatch], counts) for microbatch in make_microbatches()]
    return {name: sum(of_microbatch[name].double() for of_microbatch in of_microbatches) for name in of_microbatches[0]}


@pytest.mark.parametrize(
    "sizes", [{}, {"dp_shard": 2}, {"pp": 2, "dp_shard": 2}, {"dp_shard": 2, "fsdp": "reshard"}], ids=str
)
def test_gradients_of_rows_and_ranks_add_up_in_float32(ranks: RankPool, tmp_path: Path, sizes: dict) -> None:
    save_tiny_model(tmp_path, num_layers=2, dtype=torch.bfloat16)
    (expected,) = ranks(1).run(one_by_one, tmp_path)
    parallel = ParallelConfig(**sizes)
    for found in ranks(parallel.world_size).run(summed, tmp_path, parallel):
        for name, gradient in found.items():
            assert gradient.dtype == torch.float32
            scale = expected[name].abs().max().item()
            assert (gradient - expected[name]).abs().max().item() < 1e-5 * scale, name


def trained(folder: Path, parallel: ParallelConfig) -> tuple[set[torch.dtype], set[torch.dtype], set, float]:
    """Dtypes of weights, of moments and of what is exported, and how far weights moved in many small updates."""
    engine = Engine(load(folder, parallel), OptimizerConfig(lr=LR, decay="constant"))
    named = dict(engine.handle.named_parameters())
    before = {name: local_tensor(p.detach()).clone() for name, p in named.items()}
    for _ in range(STEPS):
        engine.train_step(make_microbatches(engine.handle.layout.data_rank, parallel.num_data_ranks), sft_loss)
    moved = torch.cat([(local_tensor(p.detach()) - before[name]).abs().flatten() for name, p in named.items()])
    return (
        {p.dtype for p in named.values()},
        {moment.dtype for moment in engine.optimizer.moments()},
        {tensor.dtype for _, tensor in engine.handle.named_hf_tensors()},
        moved.median().item(),
    )


@pytest.mark.parametrize("sizes", [{}, {"dp_shard": 2}, {"dp_shard": 2, "fsdp": "reshard"}], ids=str)
def test_updates_that_bfloat16_would_lose_are_kept_in_float32(ranks: RankPool, tmp_path: Path, sizes: dict) -> None:
    save_tiny_model(tmp_path, num_layers=2, dtype=torch.bfloat16)
    parallel = ParallelConfig(**sizes)
    for weights, moments, exported, moved in ranks(parallel.world_size).run(trained, tmp_path, parallel):
        assert weights == moments == {torch.float32}
        assert exported == {torch.bfloat16}
        # Weights of 0.1 are 5e-4 apart in bfloat16, and an update is 1e-5.
        assert 0.2 * STEPS * LR < moved < 1.2 * STEPS * LR


def dtypes_in_use(folder: Path, names: tuple[str, ...]) -> dict[str, torch.dtype]:
    """Dtypes in which modules use their weights during a step."""
    handle, found = load(folder, ParallelConfig()), {}

    def note(module: nn.Module, *_: Any) -> None:
        found[type(module).__name__] = next(module.parameters()).dtype

    for module in (module for part in handle.parts for name, module in part.named_modules() if name.endswith(names)):
        module.register_forward_hook(note)
    runner = StepRunner(handle)
    counts = runner.global_batch(make_microbatches()).counts
    runner.forward_backward(make_microbatches(), sft_loss, Readout(), counts)
    return found


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_5_text", ("linear_attn.decay", "linear_attn.norm")),
        ("ernie4_5_moe", ("mlp.gate", "input_layernorm")),
        ("hunyuan_v1_moe", ("mlp.gate", "input_layernorm")),
    ],
)
def test_decays_and_some_routers_use_their_weights_in_float32(
    ranks: RankPool, tmp_path: Path, family: str, names: tuple[str, ...]
) -> None:
    save_tiny_model(tmp_path, family, dtype=torch.bfloat16)
    (found,) = ranks(1).run(dtypes_in_use, tmp_path, names)
    accurate = {kind for kind, dtype in found.items() if dtype == torch.float32}
    assert len(found) == 2
    assert len(accurate) == 1
    assert not any("Norm" in kind for kind in accurate)
