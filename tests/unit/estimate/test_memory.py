"""What adds up to the memory of a rank, and what `memory` takes off it or puts on it."""

import dataclasses
from typing import Any, Literal

import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import LoraConfig, MemoryConfig
from automodel_rl.estimate.memory import MemoryModel, RankMemory, StepPlan
from automodel_rl.estimate.parameter_sizes import formats_of_base
from tests.tiny_families import DENSE

RANK = RankMemory(
    weights=1, moments=10, gathered=100, gradients=1000, activations=20_000, buffers=3, head=50, backward=700
)


def test_all_that_is_there_at_once_adds_up() -> None:
    assert RANK.peak == 21_814  # the head and the backward of layers come one after the other
    assert dataclasses.replace(RANK, reference=1_000_000).peak == 1_021_814
    assert dataclasses.replace(RANK, shards_at_once=True).peak == 20_814
    assert dataclasses.replace(RANK, optimizer=30_000).peak == 30_000
    assert dataclasses.replace(RANK, optimizer=30_000, reference=5).peak == 30_005
    assert dataclasses.replace(RANK, last=50_000).peak == 51_114  # when activations are gone


def plan(memory: MemoryConfig, sizes: dict[str, int]) -> StepPlan:
    config = Qwen3Config(**DENSE, num_hidden_layers=4)
    model = MemoryModel(config, ModelConfig(path="x"), 1024, OptimizerConfig())
    return model.plan(ParallelConfig(**sizes), memory, 4)


LARGE: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12_288, "num_attention_heads": 32},
    "32B": {"hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25_600, "num_attention_heads": 64},
}
"""Qwen3's shapes."""


def plan_large(
    shape: str, parallel: ParallelConfig, memory: MemoryConfig, lora: LoraConfig | None = None, tokens: int = 8192
) -> tuple[MemoryModel, StepPlan]:
    config = Qwen3Config(
        **LARGE[shape], num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=False
    )
    model = MemoryModel(config, ModelConfig(path="x", lora=lora), tokens, OptimizerConfig())
    return model, model.plan(parallel, memory, 4)


RECOMPUTED = MemoryConfig(activation_checkpointing="full")


def test_weights_that_a_stored_base_has_plain_are_counted_so() -> None:
    """By the names that config.json leaves out, in the three ways in which it writes them."""
    left_out = {
        "modules_to_not_convert": ["model.layers.*.self_attn"],
        "ignore": ["re:.*layers.1.mlp.up_proj", "lm_head"],
    }
    config = Qwen3Config(**DENSE, num_hidden_layers=2, quantization_config={"quant_method": "fp8", **left_out})
    model = AutoModelForCausalLM.from_config(config)
    model.requires_grad_(False)
    formats = formats_of_base(model, LoraConfig(base="stored"), "fp8")
    kept = [("0", "gate_proj"), ("0", "up_proj"), ("0", "down_proj"), ("1", "gate_proj"), ("1", "down_proj")]
    assert formats == {f"model.layers.{layer}.mlp.{name}.weight": "fp8_e4m3" for layer, name in kept}


def test_masters_in_bfloat16_and_moments_in_8_bits_take_half_the_bytes() -> None:
    """2 for the weight, 4 for the gradient, 2 and scales for the moments, of 16."""
    config = Qwen3Config(**DENSE, num_hidden_layers=4)
    narrow, optimizer = ModelConfig(path="x", master_dtype="bfloat16"), OptimizerConfig(name="adamw_8bit")
    model = MemoryModel(config, narrow, 1024, optimizer)
    rank = model.plan(ParallelConfig(), MemoryConfig(), 1).ranks[0]
    assert (rank.weights, rank.gradients) == (2 * model.parameters, 4 * model.parameters)
    assert 2 < rank.moments / model.parameters < 2.3  # rows are shorter than blocks


@pytest.mark.parametrize(
    "sizes", [{"dp_shard": 8}, {"dp_shard": 4, "cp": 2}, {"dp_shard": 8, "dp_replicate": 2}], ids=str
)
def test_what_ranks_share_takes_sixteen_bytes_a_parameter(sizes: dict[str, int]) -> None:
    """Masters, gradients and two moments in fp32: what every FSDP2 trainer needs."""
    model, step = plan_large("8B", ParallelConfig(fsdp="reshard", **sizes), RECOMPUTED)
    rank = step.ranks[0]
    assert rank.weights + rank.gradients + rank.moments == pytest.approx(16 * model.parameters / 8, rel=0.02)


def test_exchanged_heads_keep_less_the_more_ranks_there_are() -> None:
    """Of keys and values, a rank has those of all tokens, or its share of the heads'."""
    kept = MemoryConfig(compile=True)
    ways = {
        cp: [
            plan_large("8B", ParallelConfig(cp=cp, cp_exchange=exchange), kept, tokens=65_536)[1].ranks[0].activations
            for exchange in ("all_gather", "all_to_all")
        ]
        for cp in (2, 4, 8)
    }
    shares = [exchanged / gathered for gathered, exchanged in ways.values()]
    assert 0.97 > shares[0] > shares[1] > shares[2] > 0.8


def test_large_models_fit_as_their_weights_are_shared() -> None:
    room = 0.92 * 79.2 * 2**30
    ways = {
        fsdp: plan_large("8B", ParallelConfig(dp_shard=8, fsdp=fsdp), RECOMPUTED)[1].peak
        for fsdp in ("keep", "reduce", "reshard")
    }
    assert ways["keep"] > ways["reduce"] + 20 * 2**30
    assert ways["reduce"] > ways["reshard"] + 10 * 2**30
    assert ways["reshard"] < 35 * 2**30
    away = RECOMPUTED.model_copy(update={"offload_optimizer": True})
    assert plan_large("32B", ParallelConfig(dp_shard=8, fsdp="reshard"), away)[1].peak < room
    assert plan_large("32B", ParallelConfig(dp_shard=2, fsdp="reshard"), RECOMPUTED, LoraConfig())[1].peak < room


def test_frozen_weights_are_there_once() -> None:
    adapters = LoraConfig(targets=("all-linear",))
    model, step = plan_large("8B", ParallelConfig(), RECOMPUTED, adapters)
    trained = sum(size.gathered for size in model._whole if size.is_trained)
    assert step.ranks[0].weights == 2 * (model.parameters - trained) + 4 * trained
    assert step.ranks[0].gathered == 2 * trained


def test_the_peak_of_one_row_that_trains_all_weights_is_that_which_an_h200_had() -> None:
    """Allocated in a step with one row (benchmarks/speed.md). Gathered weights go while gradients come."""
    config = Qwen3Config(
        **LARGE["8B"], num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=False
    )
    how = MemoryConfig(activation_checkpointing="offload", mlp_tile=4096, compile=True)
    narrow = ModelConfig(path="x", master_dtype="bfloat16")
    model = MemoryModel(config, narrow, 65_536, OptimizerConfig(name="adamw_8bit"))
    assert model.plan(ParallelConfig(), how, 1).peak == pytest.approx(68.45 * 2**30, rel=0.02)
    assert model.plan(ParallelConfig(), how, 2).peak > 80 * 2**30


@pytest.mark.parametrize(("tokens", "measured"), [(57_344, 42.64), (110_592, 68.10), (118_784, 71.97)])
def test_peaks_of_adapters_are_those_that_an_h100_had(tokens: int, measured: float) -> None:
    """Allocated in a step with one row (benchmarks/speed.md)."""
    how = RECOMPUTED.model_copy(update={"compile": False})
    model, _ = plan_large("8B", ParallelConfig(), how, LoraConfig(targets=("all-linear",)), tokens)
    assert model.plan(ParallelConfig(), how, 1).peak == pytest.approx(measured * 2**30, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "base", "tokens", "how", "measured"),
    [
        ("8B", "plain", 65_536, {"activation_checkpointing": "full"}, 71.21),
        ("8B", "plain", 65_536, {"activation_checkpointing": "offload"}, 37.71),
        ("8B", "plain", 65_536, {"activation_checkpointing": "offload", "mlp_tile": 4096}, 24.17),
        ("8B", "plain", 262_144, {"activation_checkpointing": "offload", "mlp_tile": 4096}, 48.45),
        ("32B", "nf4", 8192, {"activation_checkpointing": "full"}, 39.37),
    ],
    ids=str,
)
def test_peaks_of_compiled_layers_with_adapters_are_those_that_an_h100_had(
    shape: str, base: Literal["plain", "nf4"], tokens: int, how: dict[str, Any], measured: float
) -> None:
    memory = MemoryConfig(offload_optimizer=False, **how)
    model, _ = plan_large(shape, ParallelConfig(), memory, LoraConfig(base=base), tokens)
    assert model.plan(ParallelConfig(), memory, 1).peak == pytest.approx(measured * 2**30, rel=0.05)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"cp": 2}], ids=str)
def test_offloaded_inputs_take_the_host_s_memory(sizes: dict[str, int]) -> None:
    """Of an 8B's 36 layers with rows of 131,072 tokens; of a pipeline's first rank the inputs of two microbatches."""
    tokens, hidden = 131_072, LARGE["8B"]["hidden_size"]
    how = RECOMPUTED.model_copy(update={"compile": False})
    away = how.model_copy(update={"activation_checkpointing": "offload"})
    here, there = (plan_large("8B", ParallelConfig(**sizes), each, LoraConfig(), tokens)[1] for each in (how, away))
    of_layer = 2 * tokens // sizes.get("cp", 1) * hidden
    assert here.host == 0
    assert there.host == pytest.approx(36 * of_layer, rel=0.01)
    on_device = here.ranks[0].activations - there.ranks[0].activations
    assert on_device == pytest.approx(36 * of_layer, rel=0.01)
    assert there.ranks[0].backward - here.ranks[0].backward == pytest.approx(3 * of_layer, rel=0.01)


@pytest.mark.parametrize(("fsdp", "measured"), [("keep", 45.51), ("reshard", 37.60)])
def test_peaks_of_twelve_layers_are_those_that_two_gpus_had(fsdp: str, measured: float) -> None:
    """Allocated on each of two GPUs, several microbatches of 16,384 (benchmarks/speed.md)."""
    shape = {**LARGE["8B"], "num_hidden_layers": 12}
    config = Qwen3Config(**shape, num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=False)
    model = MemoryModel(config, ModelConfig(path="x"), 16_384, OptimizerConfig())
    parallel = ParallelConfig.model_validate({"dp_shard": 2, "fsdp": fsdp})
    assert model.plan(parallel, RECOMPUTED, 5).peak == pytest.approx(measured * 2**30, rel=0.02)


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
