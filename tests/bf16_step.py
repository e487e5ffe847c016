"""The check of a step in bf16, on small models, for tests with and without CUDA."""

from pathlib import Path

import torch
from transformers import AutoConfig

from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.tools.verify.bf16 import compare_bf16
from automodel_rl.tools.verify.comparison import Case
from automodel_rl.tools.verify.small_model import save_random_model, shrink
from tests.faults import planted
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

Errors = dict[str, tuple[float, float]]
"""By kind, the error and the tolerance."""


def _errors(fault: str | None, parallel: ParallelConfig, memory: MemoryConfig, folder: Path) -> Errors:
    torch._dynamo.reset()
    with planted(fault):
        return compare_bf16(Case(parallel), memory, ModelConfig(path=str(folder)), folder)


def errors_in_bf16(
    ranks: RankPool, folder: Path, fault: str | None, model: tuple[str, int], sizes: dict, memory: MemoryConfig
) -> list[Errors]:
    """What every rank finds.

    Args:
        ranks: the pool of ranks.
        folder: an empty folder.
        fault: the bug to plant, if any.
        model: family and size of heads.
        sizes: the layout.
        memory: the config section with the compilation.
    """
    (family, head_dim), parallel = model, ParallelConfig(**sizes)
    save_tiny_model(folder / "large", family, num_layers=4, head_dim=head_dim)
    config = shrink(AutoConfig.from_pretrained(folder / "large"), parallel, whole_heads=True)
    assert config.head_dim == head_dim
    save_random_model(config, folder / "small", torch.bfloat16)
    return ranks(parallel.world_size).run(_errors, fault, parallel, memory, folder / "small")


def wrong(found: Errors) -> list[str]:
    """The kinds whose errors are more than rounding."""
    return [kind for kind, (error, tolerance) in found.items() if error > tolerance]
