"""`verify` on CUDA also compares a step in bf16, with fused attention and compiled layers."""

from pathlib import Path

import pytest

from automodel_rl.config import ParallelConfig
from automodel_rl.config.model import MemoryConfig
from tests.bf16_step import errors_in_bf16, wrong
from tests.needs import need_gpus
from tests.rank_pool import RankPool

pytestmark = pytest.mark.gpu


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
    need_gpus(ParallelConfig(**sizes).world_size)
    (found, *_) = errors_in_bf16(ranks, tmp_path, fault, (family, 64), sizes, MemoryConfig())
    assert bool(wrong(found)) == (fault is not None), found
