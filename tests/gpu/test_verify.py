"""`verify` on CUDA also compares a step in bf16, with fused attention and compiled layers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.tools.verify.bf16 import compare_bf16
from automodel_rl.tools.verify.comparison import Case
from automodel_rl.tools.verify.small_model import save_random_model, shrink
from tests.faults.table import planted
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.gpu


def errors(fault: str | None, parallel: ParallelConfig, folder: Path) -> dict[str, tuple[float, float]]:
    torch._dynamo.reset()
    with planted(fault):
        return compare_bf16(Case(parallel), MemoryConfig(), ModelConfig(path=str(folder)), folder)


@pytest.mark.parametrize(
    ("fault", "family", "sizes"),
    [
        (None, "qwen3", {}),
        (None, "qwen3_moe", {}),
        (None, "gpt_oss", {}),
        ("documents see each other", "qwen3", {}),
        (None, "qwen3", {"pp": 2}),
        (None, "qwen3", {"cp": 2}),
        (None, "qwen3", {"tp": 2, "sequence_parallel": True}),
        (None, "qwen3_moe", {"dp_shard": 2, "ep": 2}),
        ("partial gradients of tp left alone", "qwen3", {"tp": 2}),
    ],
)
def test_fused_and_compiled_steps_are_as_exact_as_plain_ones(
    ranks: RankPool, tmp_path: Path, fault: str | None, family: str, sizes: dict
) -> None:
    parallel = ParallelConfig(**sizes)
    save_tiny_model(tmp_path / "large", family, num_layers=4, head_dim=64)
    config = shrink(AutoConfig.from_pretrained(tmp_path / "large"), parallel, whole_heads=True)
    save_random_model(config, tmp_path / "small", torch.bfloat16)
    (found, *_) = ranks(parallel.world_size).run(errors, fault, parallel, tmp_path / "small")
    wrong = [kind for kind, (error, tolerance) in found.items() if error > tolerance]
    assert bool(wrong) == (fault is not None), found
