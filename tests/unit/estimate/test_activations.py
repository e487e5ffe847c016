"""The bytes that a layer keeps for its backward are those that GPUs measured."""

from typing import Literal

import pytest
import torch
from transformers import AutoConfig

from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.estimate.activations import LayerForward, layer_activations
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.estimate.parameter_sizes import empty_parts, parameter_sizes
from tests.tiny import tiny_config
from tests.tiny_families import SIZES
from tests.unit.tools.test_speed import DENSE, MIXTURE, SPLIT

Mode = Literal["none", "selective", "full"]


@pytest.mark.parametrize(
    ("family", "mode", "compiled", "measured"),
    [
        ("qwen3", "none", False, 84_136),
        ("qwen3", "none", True, 71_848),
        ("qwen3", "selective", False, 49_216),
        ("qwen3", "selective", True, 45_120),
        ("qwen3", "full", False, 4_096),
        ("qwen3", "full", True, 8_256),
        ("qwen3_moe", "none", False, 118_412),
        ("qwen3_moe", "none", True, 108_036),
        ("qwen3_moe", "selective", False, 61_632),
    ],
)
def test_a_token_keeps_as_many_bytes_as_on_a_gpu(family: str, mode: Mode, compiled: bool, measured: int) -> None:
    """Growth of the allocated memory in the forward of a layer over 8,192 tokens, on an H100 with FlashAttention-3."""
    config = AutoConfig.for_model(family, **(DENSE if family == "qwen3" else MIXTURE))
    how = LayerForward(torch.bfloat16, mode, compiled)
    found = layer_activations(config, 0, 8192, ParallelConfig(), how).kept / 8192
    assert found == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    ("family", "sizes", "capacity", "count", "measured"),
    [
        ("qwen3", {}, 8192, 8, 42.14),
        ("qwen3", {}, 16_384, 4, 57.59),
        ("qwen3", {"dp_shard": 2}, 16_384, 4, 48.96),
        ("qwen3", {"tp": 2, "sequence_parallel": True}, 16_384, 8, 31.02),
        ("qwen3", {"pp": 2, "layers_per_stage": SPLIT}, 8192, 8, 30.51),
        ("qwen3", {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}, 8192, 17, 32.54),
        ("qwen3_moe", {"dp_shard": 2}, 16_384, 4, 63.64),
        ("qwen3_moe", {"dp_shard": 2, "ep": 2}, 16_384, 4, 56.04),
    ],
)
def test_a_compiled_step_needs_what_was_measured(
    family: str, sizes: dict, capacity: int, count: int, measured: float
) -> None:
    """The most GiB that were allocated on any rank (benchmarks/speed.md)."""
    config = AutoConfig.for_model(family, **(DENSE if family == "qwen3" else MIXTURE))
    model = MemoryModel(config, ModelConfig(path="x"), capacity, OptimizerConfig())
    peak = model.plan(ParallelConfig(**sizes), MemoryConfig(), count).peak / 2**30
    assert peak == pytest.approx(measured, rel=0.05)


def test_only_layers_that_a_run_compiles_are_counted_as_such() -> None:
    config = AutoConfig.for_model("qwen3", **DENSE)
    model = MemoryModel(config, ModelConfig(path="x"), 8192, OptimizerConfig())
    eager, compiled = MemoryConfig(compile=False), MemoryConfig()
    assert model.plan(ParallelConfig(), eager, 8).peak > model.plan(ParallelConfig(), compiled, 8).peak
    split = ParallelConfig(pp=2, schedule="ZBVZeroBubble", virtual_stages=2)
    assert model.plan(split, eager, 8).peak == model.plan(split, compiled, 8).peak
    full = MemoryConfig(activation_checkpointing="full")
    assert not model.recomputes_attention(ParallelConfig(), full)
    assert model.recomputes_attention(split, full)


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("tp", [1, 2])
def test_layers_of_every_family_are_measured(family: str, tp: int) -> None:
    config, how = tiny_config(family, 4), LayerForward(torch.bfloat16, "none", compiled=False)
    for layer in range(config.num_hidden_layers):
        assert layer_activations(config, layer, 64, ParallelConfig(tp=tp), how).kept > 0
    parts = empty_parts(config, torch.bfloat16, ModelConfig(path="a folder"))
    names = [size.name for part in parts for size in parameter_sizes(part, ParallelConfig(tp=tp))]
    assert {"model.embed_tokens.weight", "lm_head.weight"} & {*names}
