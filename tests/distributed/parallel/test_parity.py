"""Every layout computes the numbers of one process, to rounding, and planted bugs are noticed.

This is a representative set; `make parity` runs the whole matrix.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from automodel_rl.compat.versions import TORCH
from automodel_rl.config import ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.families.known import FAMILIES
from automodel_rl.families.text import TEXT_FAMILIES
from automodel_rl.tools.verify.command import FLOAT32, FLOAT64, Tolerances, judge
from automodel_rl.tools.verify.comparison import Case, Differences, compare
from tests.needs import needs_nemo
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

QUICK = pytest.mark.quick
SPLIT = pytest.mark.skipif(TORCH < (2, 13), reason="this torch cannot split the backward")
SP = {"sequence_parallel": True}


def differences(ranks: RankPool, folder: Path, case: Case) -> Differences:
    return ranks(case.parallel.world_size).run(compare, case, folder, folder)[0]


def assert_equal(found: Differences, tolerances: Tolerances) -> None:
    different = [microbatch for microbatch in judge(found, tolerances) if not microbatch.is_equal]
    assert not different, different


def check(ranks: RankPool, folder: Path, family: str, microbatches: tuple[int, ...] = (3, 2), **sizes: object) -> None:
    parallel = ParallelConfig(**sizes)
    tolerances = FLOAT64 if FAMILIES[family].is_exact(parallel.tp) else FLOAT32
    assert_equal(differences(ranks, folder, Case(parallel, microbatches)), tolerances)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("pp", "tied"), [(1, False), (1, True), (2, True)])
def test_dense_families_equal_one_process(ranks: RankPool, tmp_path: Path, pp: int, family: str, tied: bool) -> None:
    save_tiny_model(tmp_path, family, tied=tied)
    check(ranks, tmp_path, family, pp=pp)


@pytest.mark.parametrize("family", [family for family in TEXT_FAMILIES if family not in ("llama", "qwen2", "qwen3")])
def test_every_other_family_equals_one_process(ranks: RankPool, tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family, tied=family.startswith("gemma"), has_unusual_numbers=True)
    check(ranks, tmp_path, family, (2, 1))  # on other layouts in `make parity`, and some below


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gemma3_text", {"cp": 2}),
        ("gpt_oss", {"cp": 2}),
        ("deepseek_v3", {"cp": 2}),
        ("minimax_m2", {"pp": 2}),
        ("smollm3", {"tp": 2}),
        ("qwen2_moe", {"cp": 2, "ep": 2}),
        ("apertus", {"tp": 2}),
        ("qwen3_next", {"cp": 2, "tp": 2, **SP, "fsdp": "reshard"}),
        ("qwen3_5_text", {"pp": 2, "tp": 2}),
        ("cohere", {"tp": 2, **SP}),
        ("glm4", {"tp": 2, **SP}),
        ("olmo2", {"tp": 2}),
        ("phi3", {"tp": 2}),
        ("gpt_oss", {"tp": 2}),
        ("deepseek_v3", {"tp": 2}),
        ("deepseek_v2", {"tp": 2, **SP, "ep": 2}),
        ("deepseek_v32", {"cp": 2, "tp": 2}),
        ("glm_moe_dsa", {"pp": 2, "cp": 2}),
        ("kimi_linear", {"cp": 2, "tp": 2}),
        ("kimi_linear", {"cp": 2, "fsdp": "reshard"}),
        ("falcon_h1", {"cp": 2, "fsdp": "reshard"}),
    ],
    ids=str,
)
def test_families_of_every_kind_equal_one_process_on_other_layouts(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict
) -> None:
    save_tiny_model(tmp_path, family, tied=family == "smollm3")
    check(ranks, tmp_path, family, **sizes)


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_any_number_of_microbatches_equals_one_process(ranks: RankPool, tmp_path: Path, num_microbatches: int) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    check(ranks, tmp_path, "qwen3", (num_microbatches,) * 3, pp=2)


def test_27_layers_as_13_and_14_equal_one_process(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=27, tied=True)
    check(ranks, tmp_path, "qwen3", pp=2, layers_per_stage=(13, 14))


SCHEDULES = [
    ("GPipe", 1),
    pytest.param("Interleaved1F1B", 2, marks=QUICK),
    ("LoopedBFS", 2),
    pytest.param("InterleavedZeroBubble", 2, marks=SPLIT),
    pytest.param("ZBVZeroBubble", 2, marks=SPLIT),
    pytest.param("DualPipeV", 2, marks=SPLIT),
]


@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
def test_every_schedule_equals_one_process(ranks: RankPool, tmp_path: Path, schedule: str, virtual_stages: int) -> None:
    save_tiny_model(tmp_path, num_layers=5, tied=True)
    check(ranks, tmp_path, "qwen3", (3, 1, 4), pp=2, schedule=schedule, virtual_stages=virtual_stages)


@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES[5:])
def test_schedules_of_a_mixture_over_cp_and_ep_equal_one_process(
    ranks: RankPool, tmp_path: Path, schedule: str, virtual_stages: int
) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", tied=True)
    check(ranks, tmp_path, "qwen3_moe", (3, 5), pp=2, schedule=schedule, virtual_stages=virtual_stages, cp=2, ep=2)


def test_thirteen_stages_of_2_layers_and_one_of_1_equal_one_process(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=27)
    layers = (2,) * 13 + (1,)
    check(ranks, tmp_path, "qwen3", (3, 2), pp=2, schedule="Interleaved1F1B", virtual_stages=7, layers_per_stage=layers)


def test_four_stages_of_7_6_8_and_6_layers_equal_one_process(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=27)
    check(ranks, tmp_path, "qwen3", (5, 2), pp=4, layers_per_stage=(7, 6, 8, 6))


LAYOUTS = [
    pytest.param({"dp_shard": 2}, marks=QUICK),
    {"dp_shard": 2, "dp_replicate": 2},
    {"tp": 2},
    pytest.param({"tp": 2, **SP}, marks=QUICK),
    pytest.param({"cp": 2}, marks=QUICK),
    {"cp": 4},
    {"pp": 2, "tp": 2, **SP},
    {"pp": 2, "cp": 2},
]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_layouts_of_a_dense_model_equal_one_process(ranks: RankPool, tmp_path: Path, sizes: dict) -> None:
    save_tiny_model(tmp_path, "qwen3", tied="tp" in sizes or "pp" in sizes)
    check(ranks, tmp_path, "qwen3", **sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"dp_shard": 2, "ep": 2}, marks=QUICK),
        {"cp": 2, "ep": 2},
        {"pp": 2, "dp_shard": 2, "ep": 2},
        {"dp_shard": 2, "cp": 2, "ep": 4},
        {"dp_shard": 2, "tp": 2, **SP, "ep": 4},
        {"cp": 2, "tp": 2, **SP, "ep": 2},
    ],
    ids=str,
)
def test_layouts_of_a_mixture_equal_one_process(ranks: RankPool, tmp_path: Path, sizes: dict) -> None:
    save_tiny_model(tmp_path, "qwen3_moe")
    check(ranks, tmp_path, "qwen3_moe", **sizes)


VIRTUAL = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", {"cp": 2, "ep": 2}),
        ("mixtral", {"tp": 2, **SP, "ep": 2}),
        ("deepseek_v3", {"tp": 2, **SP}),
        ("deepseek_v2", {"cp": 2, "ep": 2}),
        ("minimax_m2", {"cp": 2, "ep": 2}),
        ("gpt_oss", {"cp": 2, "ep": 2}),
        ("granitemoeshared", {"dp_shard": 2, "ep": 2}),
        ("ernie4_5_moe", {"cp": 2}),
    ],
    ids=str,
)
def test_families_of_mixtures_that_follow_routes_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict
) -> None:
    save_tiny_model(tmp_path, family)
    parallel = ParallelConfig(**VIRTUAL, **sizes)
    recomputed = MemoryConfig(activation_checkpointing="full")
    found = differences(ranks, tmp_path, Case(parallel, (3, 2), memory=recomputed, replay=True))
    assert_equal(found, FLOAT64 if FAMILIES[family].is_exact(parallel.tp) else FLOAT32)


@needs_nemo
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"cp": 2}], ids=str)
def test_classes_of_nemo_automodel_equal_one_process(ranks: RankPool, tmp_path: Path, sizes: dict, family: str) -> None:
    save_tiny_model(tmp_path, family, tied="pp" in sizes, dtype=torch.float32)
    case = Case(ParallelConfig(**sizes), dtype="float32", implementation="nemo_automodel")
    assert_equal(differences(ranks, tmp_path, case), FLOAT32)


@needs_nemo
@pytest.mark.parametrize(
    ("family", "sizes", "replay"),
    [
        ("qwen3_moe", {}, False),
        ("qwen3_moe", {"cp": 2, "ep": 2}, True),
        ("deepseek_v3", {"pp": 2, "dp_shard": 2, "ep": 2}, True),
        ("gpt_oss", {"pp": 2, "cp": 2}, True),
        ("gpt_oss", {"dp_shard": 2, "ep": 2}, False),
    ],
    ids=str,
)
def test_mixtures_of_nemo_automodel_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, replay: bool
) -> None:
    save_tiny_model(tmp_path, family, dtype=torch.float32)
    case = Case(ParallelConfig(**sizes), dtype="float32", implementation="nemo_automodel", replay=replay)
    assert_equal(differences(ranks, tmp_path, case), FLOAT32)


@needs_nemo
def test_groups_that_a_router_leaves_out_stay_so_with_low_biases(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v3", dtype=torch.float32, n_group=2, topk_group=1)
    tensors = load_file(tmp_path / "model.safetensors")
    lower = {name: tensor - 1.5 for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}
    assert lower
    save_file(tensors | lower, tmp_path / "model.safetensors", {"format": "pt"})
    case = Case(microbatches=(2, 1), dtype="float32", implementation="nemo_automodel")
    assert_equal(differences(ranks, tmp_path, case), FLOAT32)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_first_step_in_float32_is_near_one_process(ranks: RankPool, tmp_path: Path, pp: int) -> None:
    save_tiny_model(tmp_path, "qwen3", dtype=torch.float32)
    found = differences(ranks, tmp_path, Case(ParallelConfig(pp=pp), microbatches=(3,), dtype="float32"))
    assert found.first["loss"] < 1e-6, found
    assert found.first["gradient norm"] < 1e-5, found


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
        ("mixtral", {"cp": 2}),
        ("qwen3_moe", {"tp": 2}),
        ("granitemoe", {"tp": 2, **SP, "ep": 2}),
        ("mixtral", {"pp": 2, "dp_shard": 2, "ep": 2}),
    ],
    ids=str,
)
def test_the_auxiliary_loss_of_mixtures_equals_one_process(
    ranks: RankPool, tmp_path: Path, sizes: dict, family: str
) -> None:
    save_tiny_model(tmp_path, family)
    assert_equal(differences(ranks, tmp_path, Case(ParallelConfig(**sizes), (3, 2), aux_loss=0.1)), FLOAT64)
