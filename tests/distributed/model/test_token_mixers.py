"""Layers that mix tokens by a state or a convolution, in sizes that split in other ways than those of the suite."""

from pathlib import Path
from typing import Any

import pytest

from automodel_rl import ModelHandle
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.errors import InputError
from automodel_rl.families.known import FAMILIES
from automodel_rl.tools.verify.command import FLOAT32, FLOAT64, judge
from automodel_rl.tools.verify.comparison import Case, compare
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

GRANITE = "granitemoehybrid"
ONE_GROUP: dict[str, Any] = {"mamba_n_groups": 1}
FOUR_GROUPS: dict[str, Any] = {"mamba_n_groups": 4}
DENSE: dict[str, Any] = {"num_local_experts": 0}
ATTENTION_ALONE: dict[str, Any] = {
    **DENSE,
    "layer_types": ["full_attention"] * 4,
    "position_embedding_type": "rope",
}


@pytest.mark.parametrize(
    ("family", "changed", "sizes"),
    [
        (GRANITE, ONE_GROUP, {"cp": 2}),
        (GRANITE, ONE_GROUP, {"cp": 2, "tp": 2}),
        (GRANITE, FOUR_GROUPS, {"cp": 2, "tp": 2, "sequence_parallel": True}),
        (GRANITE, DENSE, {"pp": 2, "tp": 2}),
        (GRANITE, ATTENTION_ALONE, {"tp": 2}),
        ("lfm2", {"conv_bias": False}, {"cp": 2, "tp": 2, "sequence_parallel": True}),
    ],
    ids=str,
)
def test_other_sizes_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, changed: dict, sizes: dict
) -> None:
    save_tiny_model(tmp_path, family, **changed)
    parallel = ParallelConfig(**sizes)
    found = ranks(parallel.world_size).run(compare, Case(parallel, (3, 1, 2)), tmp_path, tmp_path)[0]
    tolerances = FLOAT64 if FAMILIES[family].is_exact(parallel.tp) else FLOAT32
    different = [row for row in judge(found, tolerances) if not row.is_equal]
    assert not different, different


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, GRANITE)
    with pytest.raises(InputError, match=r"parallel.cp x parallel.tp = 16 must divide the 8 heads \(or channels\) of"):
        ModelHandle.from_pretrained(ModelConfig(path=str(tmp_path)), ParallelConfig(cp=16))
