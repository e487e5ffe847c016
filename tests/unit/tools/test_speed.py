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
from automodel_rl.tools.plan.speed import WAIT, Work, _of_layers, step_seconds


def seconds_of_messages(num_chosen: int, ep: int) -> float:
    """Seconds that a step takes longer with experts on several ranks."""
    config = SimpleNamespace(num_hidden_layers=4, hidden_size=64, num_experts_per_tok=num_chosen)
    model: Any = SimpleNamespace(
        config=config,
        values={},
        parameters=1e9,
        active_parameters=1e8,
        compute=2,
        gradient=4,
        microbatch_tokens=8192,
        recomputes_attention=lambda parallel, memory: False,
    )
    with_ep, without = (
        step_seconds(model, ParallelConfig(dp_shard=4, ep=size), MemoryConfig(), Work(1e6), 0.0, DEVICES["H200"])
        for size in (ep, 1)
    )
    return with_ep - without - 4 * WAIT["ep"] * (1e6 / 4 / 8192)


@pytest.mark.parametrize(
    ("num_chosen", "ep", "ranks_met"), [(1, 2, 0.5), (8, 2, 1 - 0.5**8), (2, 4, 3 * (1 - 0.75**2))]
)
def test_a_token_travels_once_to_every_rank_with_experts_of_its_own(num_chosen: int, ep: int, ranks_met: float) -> None:
    per_rank = seconds_of_messages(1, 4) / (3 / 4)
    assert seconds_of_messages(num_chosen, ep) == pytest.approx(ranks_met * per_rank)


DENSE = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 32_768,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {
    "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 16, "vocab_size": 32_768,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False,
    "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 640,
}  # fmt: skip
SPLIT = [15, 13]


def test_exchanged_heads_send_less_the_more_ranks_there_are() -> None:
    """Of 16 heads and 8 KV heads: 24 heads of a rank's tokens there and back, and not 16 of all tokens."""
    model = MemoryModel(AutoConfig.for_model("qwen3", **DENSE), ModelConfig(path="x"), 8192, OptimizerConfig())

    def seconds(**sizes: Any) -> float:
        parallel = ParallelConfig(**sizes)
        return _of_layers(model, parallel, MemoryConfig(), 1e6, DEVICES["H200"]) - 28 * WAIT["cp"] * 1e6 / 8192

    for cp in (2, 4, 8):
        share = seconds(cp=cp, cp_exchange="all_to_all") / seconds(cp=cp)
        assert share == pytest.approx(2 * 2 * 24 * (cp - 1) / cp**2 / (3 * 2 * 8))


@pytest.mark.parametrize(
    ("device", "family", "sizes", "capacity", "measured"),
    [
        ("H200", "qwen3", {}, 8192, 52_384),
        ("H200", "qwen3", {}, 33_200, 56_642),
        ("H200", "qwen3", {"dp_shard": 2}, 33_200, 53_505),
        ("H200", "qwen3", {"tp": 2, "sequence_parallel": True}, 33_200, 43_676),
        ("H200", "qwen3", {"pp": 2, "layers_per_stage": SPLIT}, 8192, 47_244),
        ("H200", "qwen3_moe", {}, 33_200, 81_333),
        ("H200", "qwen3_moe", {"dp_shard": 2}, 33_200, 84_283),
        ("H200", "qwen3_moe", {"dp_shard": 2, "ep": 2}, 33_200, 64_747),
        ("H100", "qwen3", {}, 16_384, 44_687),
        ("H100", "qwen3", {"dp_shard": 2}, 16_384, 42_469),
        ("H100", "qwen3", {"tp": 2, "sequence_parallel": True}, 16_384, 30_297),
        ("H100", "qwen3", {"pp": 2, "layers_per_stage": SPLIT}, 8192, 40_698),
        ("H100", "qwen3", {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}, 8192, 39_795),
        ("H100", "qwen3_moe", {"dp_shard": 2}, 16_384, 65_778),
        ("H100", "qwen3_moe", {"dp_shard": 2, "ep": 2}, 16_384, 43_115),
    ],
)
def test_estimates_of_short_sequences_are_near_what_was_measured(
    device: str, family: str, sizes: dict, capacity: int, measured: int
) -> None:
    """Tokens a second and GPU, with sequences of 1,200 tokens on average and 65,536 tokens a step and GPU
    (benchmarks/speed.md)."""
    config = AutoConfig.for_model(family, **(DENSE if family == "qwen3" else MIXTURE))
    parallel, memory = ParallelConfig(**sizes), MemoryConfig()
    lengths = np.clip(np.random.default_rng(0).lognormal(math.log(700), 1.0, 1000), 64, 8192).astype(int).tolist()
    work = Work(65_536 * parallel.world_size, sum(map(AttentionFlops(config), lengths)) / sum(lengths))
    model = MemoryModel(config, ModelConfig(path="x"), capacity, OptimizerConfig())
    count = math.ceil(work.num_tokens / parallel.num_data_ranks / capacity)
    bubble = model.plan(parallel, memory, count).timeline.bubble
    seconds = step_seconds(model, parallel, memory, work, bubble, DEVICES[device])
    assert 65_536 / seconds == pytest.approx(measured, rel=0.15)
