"""What adds up to the memory of a rank, and what `memory` takes off it or puts on it."""

import dataclasses

import pytest
from transformers import Qwen3Config

from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.estimate.memory import MemoryModel, RankMemory, StepPlan
from tests.tiny_families import DENSE

RANK = RankMemory(
    weights=1, moments=10, gathered=100, gradients=1000, activations=20_000, buffers=3, head=50, backward=700
)


def test_all_that_is_there_at_once_adds_up() -> None:
    assert RANK.peak == 21_864
    assert dataclasses.replace(RANK, reference=1_000_000).peak == 1_021_864
    assert dataclasses.replace(RANK, shards_at_once=True).peak == 20_864
    assert dataclasses.replace(RANK, optimizer=30_000).peak == 30_000
    assert dataclasses.replace(RANK, optimizer=30_000, reference=5).peak == 30_005


def plan(memory: MemoryConfig, sizes: dict[str, int]) -> StepPlan:
    config = Qwen3Config(**DENSE, num_hidden_layers=4)
    model = MemoryModel(config, ModelConfig(path="x"), 1024, OptimizerConfig())
    return model.plan(ParallelConfig(**sizes), memory, 4)


@pytest.mark.parametrize("sizes", [{}, {"dp_shard": 2}, {"pp": 2}], ids=str)
def test_references_and_moments_are_where_the_config_has_them(sizes: dict[str, int]) -> None:
    plain = plan(MemoryConfig(reference="host"), sizes)
    with_reference = plan(MemoryConfig(reference="device"), sizes)
    away = plan(MemoryConfig(reference="host", offload_optimizer=True), sizes)
    for one, other, third in zip(plain.ranks, with_reference.ranks, away.ranks, strict=True):
        assert one.moments == 2 * one.weights  # of AdamW, in the dtype of master weights
        assert other.peak - one.peak == other.reference == one.weights // 2  # bfloat16 of float32
        assert (third.moments, third.weights) == (0, one.weights)
        assert third.optimizer == 4 * one.weights  # weights, two moments and gradients
        assert third.peak < one.peak
