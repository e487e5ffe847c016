"""Context-parallel ranks that exchange heads (Ulysses) compute what one process does, for every kind of attention."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from automodel_rl import ModelHandle
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.errors import InputError
from automodel_rl.families.known import FAMILIES
from automodel_rl.tools.verify.command import FLOAT32, FLOAT64, judge
from automodel_rl.tools.verify.comparison import Case, compare
from automodel_rl.tools.verify.small_model import shrink
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

FOUR_HEADS: dict[str, Any] = {"num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("family", "changed", "sizes"),
    [
        ("qwen3", {}, {"cp": 2}),
        ("llama", FOUR_HEADS, {"cp": 4}),
        ("qwen2", FOUR_HEADS, {"cp": 2, "tp": 2, "sequence_parallel": True}),
        ("gpt_oss", {}, {"cp": 2, "ep": 2}),  # sinks and windows
        ("gemma2", {}, {"pp": 2, "cp": 2}),  # soft caps and windows
        ("deepseek_v3", {}, {"cp": 2, "dp_shard": 2}),  # values of other dims than keys
        ("qwen3_next", {}, {"cp": 2}),  # layers without attention exchange theirs, too
    ],
    ids=str,
)
def test_exchanged_heads_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, changed: dict, sizes: dict
) -> None:
    save_tiny_model(tmp_path, family, **changed)
    parallel = ParallelConfig(cp_exchange="all_to_all", **sizes)
    found = ranks(parallel.world_size).run(compare, Case(parallel, (3, 1, 2)), tmp_path, tmp_path)[0]
    tolerances = FLOAT64 if FAMILIES[family].is_exact(parallel.tp) else FLOAT32
    different = [row for row in judge(found, tolerances) if not row.is_equal]
    assert not different, different


def test_a_small_model_of_verify_has_heads_for_all_ranks(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", num_attention_heads=8, num_key_value_heads=4)
    config = AutoConfig.from_pretrained(tmp_path)
    for sizes in ({"cp": 4}, {"cp": 2, "tp": 2}):
        small = shrink(config, ParallelConfig(cp_exchange="all_to_all", **sizes))
        assert small.num_key_value_heads == 4


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    parallel = ParallelConfig(cp=4, cp_exchange="all_to_all")
    with pytest.raises(InputError, match=r"parallel.cp x parallel.tp = 4 must divide the 2 key-value heads: use"):
        ModelHandle.from_pretrained(ModelConfig(path=str(tmp_path)), parallel)
