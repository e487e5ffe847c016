"""The estimate of a step's time: its messages are those that the ranks send."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.model.flops import AttentionFlops
from automodel_rl.tools.plan.devices import DEVICES
from automodel_rl.tools.plan.speed import Work, step_seconds


def seconds_of_messages(num_chosen: int, ep: int) -> float:
    """Seconds that a step takes longer with experts on several ranks."""
    config = SimpleNamespace(num_hidden_layers=4, hidden_size=64, num_experts_per_tok=num_chosen)
    model: Any = SimpleNamespace(
        config=config, values={}, parameters=1e9, active_parameters=1e8, compute=2, master=4, num_moments=2
    )
    with_ep, without = (
        step_seconds(model, ParallelConfig(dp_shard=4, ep=size), MemoryConfig(), Work(1e6), 0.0, DEVICES["H200"])
        for size in (ep, 1)
    )
    return with_ep - without


@pytest.mark.parametrize(
    ("num_chosen", "ep", "ranks_met"), [(1, 2, 0.5), (8, 2, 1 - 0.5**8), (2, 4, 3 * (1 - 0.75**2))]
)
def test_a_token_travels_once_to_every_rank_with_experts_of_its_own(num_chosen: int, ep: int, ranks_met: float) -> None:
    per_rank = seconds_of_messages(1, 4) / (3 / 4)
    assert seconds_of_messages(num_chosen, ep) == pytest.approx(ranks_met * per_rank)


def test_the_estimate_of_short_sequences_is_near_what_was_measured() -> None:
    """The same model with sequences of 1,200 tokens on average: 52,384 tokens/s (benchmarks/README.md)."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 32_768}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    config = AutoConfig.for_model("qwen3", **sizes, **heads)
    lengths = np.clip(np.random.default_rng(0).lognormal(math.log(700), 1.0, 1000), 64, 8192).astype(int).tolist()
    work = Work(65_536, sum(map(AttentionFlops(config), lengths)) / sum(lengths))
    model = MemoryModel(config, ModelConfig(path="x"), 8192, OptimizerConfig())
    seconds = step_seconds(model, ParallelConfig(), MemoryConfig(), work, 0.0, DEVICES["H200"])
    assert work.num_tokens / seconds == pytest.approx(52_384, rel=0.15)
