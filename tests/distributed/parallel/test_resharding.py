"""Gradients summed in shards, and weights gathered layer by layer, give the numbers of one process."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.config.parallel import Fsdp
from automodel_rl.engine import Engine
from automodel_rl.families.known import FAMILIES
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.tools.verify.command import FLOAT32, FLOAT64
from automodel_rl.tools.verify.comparison import Case
from tests.distributed.parallel.test_parity import SP, assert_equal, differences
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

INTERLEAVED = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("family", "tied", "sizes"),
    [
        ("qwen3", False, {}),
        ("qwen3", True, {"dp_shard": 2}),
        pytest.param("llama", False, {"dp_shard": 2}, marks=pytest.mark.quick),
        ("qwen3", False, {"dp_shard": 2, "dp_replicate": 2}),
        ("qwen2", False, {"cp": 2}),
        ("qwen3", False, {"tp": 2, "dp_shard": 2, **SP}),
        ("qwen3", True, {"pp": 2, "dp_shard": 2}),
        ("qwen3", False, {"pp": 2, "dp_shard": 2, "dp_replicate": 2}),
        ("llama", False, {"pp": 2, "schedule": "GPipe", "cp": 2}),
        ("qwen3", True, {**INTERLEAVED, "dp_shard": 2}),
        ("llama", False, {"pp": 2, "schedule": "LoopedBFS", "virtual_stages": 2, "cp": 2}),
        ("qwen3_moe", False, {"dp_shard": 2, "ep": 2}),
        ("qwen3_moe", False, {"dp_shard": 2, "cp": 2, "ep": 2}),
        ("deepseek_v3", False, {**INTERLEAVED, "cp": 2, "ep": 2}),
        ("qwen3_next", False, {"dp_shard": 2}),
        ("gemma3_text", True, {"cp": 2}),
        ("gpt_oss", False, {"dp_shard": 2, "ep": 2}),
    ],
    ids=str,
)
def test_layouts_equal_one_process(ranks: RankPool, tmp_path: Path, family: str, tied: bool, sizes: dict) -> None:
    save_tiny_model(tmp_path, family, tied=tied)
    parallel = ParallelConfig(fsdp="reshard", **sizes)
    tolerances = FLOAT64 if FAMILIES[family].is_exact(parallel.tp) else FLOAT32
    assert_equal(differences(ranks, tmp_path, Case(parallel, (3, 2))), tolerances)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {"dp_shard": 2}),
        ("qwen3", {"dp_shard": 2, "dp_replicate": 2}),
        ("llama", {**INTERLEAVED, "cp": 2}),
        ("qwen3_moe", {"pp": 2, "schedule": "GPipe", "dp_shard": 2, "ep": 2}),
    ],
    ids=str,
)
def test_layouts_that_only_reduce_each_microbatch_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict
) -> None:
    save_tiny_model(tmp_path, family)
    assert_equal(differences(ranks, tmp_path, Case(ParallelConfig(fsdp="reduce", **sizes), (3, 2))), FLOAT64)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen3_moe", {"dp_shard": 2, "ep": 2}), ("qwen3_next", {"pp": 2, "dp_shard": 2})], ids=str
)
def test_recomputed_layers_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, mode: str
) -> None:
    save_tiny_model(tmp_path, family)
    memory = MemoryConfig(activation_checkpointing=mode)
    case = Case(ParallelConfig(fsdp="reshard", **sizes), (3, 2), memory=memory)
    assert_equal(differences(ranks, tmp_path, case), FLOAT64 if FAMILIES[family].is_exact(1) else FLOAT32)


def exchanges_of_a_step(folder: Path, fsdp: Fsdp, num_microbatches: int) -> tuple[Counter[str], Counter[str]]:
    """How often a step gathers each FSDP unit, and how often it reduces its gradients."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder)), ParallelConfig(dp_shard=2, fsdp=fsdp))
    engine = Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))
    microbatches = [pack_microbatch(make_sequences(2, number)) for number in range(num_microbatches)]
    engine.train_step(microbatches, sft_loss)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.train_step(microbatches, sft_loss)
    names = [event.name for event in profile.events()]
    gathers, reductions = (
        Counter(match[1] for name in names if (match := re.fullmatch(rf"FSDP::{kind} \((\S+)\)", name)))
        for kind in ("all_gather", "post_backward_reduce")
    )
    return gathers, reductions


@pytest.mark.parametrize("fsdp", ["keep", "reduce", "reshard"])
def test_units_are_gathered_no_oftener_than_they_are_needed(ranks: RankPool, tmp_path: Path, fsdp: Fsdp) -> None:
    """And keep whole gradients no longer than one microbatch, unless they are to be kept."""
    save_tiny_model(tmp_path, "qwen3", num_layers=3)
    once, layer = (3, 6) if fsdp == "reshard" else (1, 1)
    layers = [f"model.layers.{number}" for number in range(3)]
    units = ["model.embed_tokens", "lm_head", *layers]
    for gathers, reductions in ranks(2).run(exchanges_of_a_step, tmp_path, fsdp, 3):
        assert gathers == {unit: layer if unit in layers else once for unit in units}
        assert reductions == dict.fromkeys(units, 1 if fsdp == "keep" else 3)
