"""Gemma 4's small models: layers with embeddings of their own, which take keys and values of earlier layers."""

from pathlib import Path
from typing import Any

import pytest

from automodel_rl import ModelHandle
from automodel_rl.config import MemoryConfig, ModelConfig, ParallelConfig
from automodel_rl.errors import InputError
from automodel_rl.tools.verify.command import FLOAT32, judge
from automodel_rl.tools.verify.comparison import Case, compare
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

SMALL: dict[str, Any] = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "enable_moe_block": False,
    "num_experts": None,
    "attention_k_eq_v": False,
}
"""What E2B and E4B have besides the large models."""


@pytest.mark.parametrize(
    ("sizes", "recomputed"),
    [
        ({}, "selective"),
        ({"cp": 2}, "full"),
        ({"tp": 2}, "none"),
        ({"tp": 2, "sequence_parallel": True}, "full"),
        ({"dp_shard": 2}, "full"),
    ],
    ids=str,
)
def test_small_models_equal_one_process(ranks: RankPool, tmp_path: Path, sizes: dict, recomputed: Any) -> None:
    save_tiny_model(tmp_path, "gemma4_text", tied=True, **SMALL)
    parallel, memory = ParallelConfig(**sizes), MemoryConfig(activation_checkpointing=recomputed)
    found = ranks(parallel.world_size).run(compare, Case(parallel, (3, 1, 2), memory=memory), tmp_path, tmp_path)[0]
    different = [row for row in judge(found, FLOAT32) if not row.is_equal]
    assert not different, different


def test_a_pipeline_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gemma4_text", **SMALL)
    with pytest.raises(InputError, match=r"parallel.pp=2: layers of this 'gemma4_text' model take keys and values of"):
        ModelHandle.from_pretrained(ModelConfig(path=str(tmp_path)), ParallelConfig(pp=2))
