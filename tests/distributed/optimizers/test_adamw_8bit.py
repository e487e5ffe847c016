"""AdamW with moments in 8 bits trains the same on every kind of layout, and its checkpoints move between them."""

from pathlib import Path
from typing import Any

import pytest

from automodel_rl.config import ParallelConfig
from automodel_rl.errors import InputError
from automodel_rl.tools.verify.comparison import Case, compare
from tests.distributed.optimizers.test_checkpoints import make_engine
from tests.distributed.optimizers.test_muon import OFFLOADED, different
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

NAME = "adamw_8bit"
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Sizes of which a half is whole blocks."""


@pytest.mark.parametrize(
    ("family", "tied", "sizes", "widths"),
    [
        ("qwen3", False, {"dp_shard": 2}, {}),
        ("qwen2", False, {"dp_shard": 3}, WIDE),  # rows of uneven numbers
        ("qwen3", True, {"pp": 2}, {}),
        ("qwen3", False, {"tp": 2, "dp_shard": 2}, WIDE),
        ("qwen3", True, {"cp": 2, "dp_replicate": 2}, {}),
        ("qwen3_moe", False, {"dp_shard": 2, "ep": 2}, {}),
    ],
    ids=str,
)
def test_layouts_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, tied: bool, sizes: dict, widths: dict[str, Any]
) -> None:
    save_tiny_model(tmp_path, family, tied=tied, num_layers=2, **widths)
    parallel = ParallelConfig(**sizes)
    case = Case(parallel, microbatches=(3, 1, 2), memory=OFFLOADED, optimizer=NAME)
    assert not different(ranks(parallel.world_size).run(compare, case, tmp_path, tmp_path)[0])


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as refused:
        make_engine(folder, ParallelConfig(tp=2), NAME)
    return str(refused.value)


def test_rows_that_are_cut_within_a_block_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=1)
    text = ranks(2).run(refusal, tmp_path)[0]
    assert text.startswith("optimizer.name=adamw_8bit: rows of model.layers.0.")
    assert text.endswith("which are not whole blocks of 128: use adamw, or another parallel.tp")
