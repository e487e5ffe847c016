"""Every layout computes the numbers of one process, to rounding, and planted bugs are noticed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from automodel_rl.config import ParallelConfig
from automodel_rl.parallel.schedules import torch_splits_backward
from tests.distributed.parity import Case, Differences, compare
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

Ranks = Callable[[int], RankPool]


def largest(results: list[Differences]) -> Differences:
    total = Differences()
    for result in results:
        for kind, value in vars(result).items():
            total.note(kind, value)
    return total


def differences(ranks: Ranks, folder: Path, case: Case, fault: str | None = None) -> Differences:
    return largest(ranks(case.parallel.world_size).run(compare, case, folder, fault))


def assert_exact(found: Differences) -> None:
    assert found.loss < 1e-10, found
    assert found.norm < 1e-10, found
    assert found.gradient < 1e-10, found
    assert found.logprob < 1e-10, found
    assert found.weight < 1e-9, found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("pp", [1, 2])
def test_float64_equals_transformers(ranks: Ranks, tmp_path: Path, pp: int, family: str, tied: bool) -> None:
    save_tiny_model(tmp_path, family, tied=tied)
    assert_exact(differences(ranks, tmp_path, Case(ParallelConfig(pp=pp))))


@pytest.mark.parametrize("num_rows", range(1, 8))
def test_any_number_of_microbatches(ranks: Ranks, tmp_path: Path, num_rows: int) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    assert_exact(differences(ranks, tmp_path, Case(ParallelConfig(pp=2), rows=(num_rows,) * 5)))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_27_layers_as_13_and_14(ranks: Ranks, tmp_path: Path, tied: bool) -> None:
    save_tiny_model(tmp_path, num_layers=27, tied=tied)
    assert_exact(differences(ranks, tmp_path, Case(ParallelConfig(pp=2, layers_per_stage=(13, 14)))))


SPLIT = pytest.mark.skipif(not torch_splits_backward(), reason="this torch cannot split the backward")
SCHEDULES = [
    ("GPipe", 1),
    ("Interleaved1F1B", 2),
    ("LoopedBFS", 2),
    pytest.param("InterleavedZeroBubble", 2, marks=SPLIT),
    pytest.param("ZBVZeroBubble", 2, marks=SPLIT),
    pytest.param("DualPipeV", 2, marks=SPLIT),
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
def test_every_schedule(ranks: Ranks, tmp_path: Path, schedule: str, virtual_stages: int, tied: bool) -> None:
    save_tiny_model(tmp_path, num_layers=5, tied=tied)
    parallel = ParallelConfig(pp=2, schedule=schedule, virtual_stages=virtual_stages)
    assert_exact(differences(ranks, tmp_path, Case(parallel)))


@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
def test_every_schedule_over_two_data_ranks(ranks: Ranks, tmp_path: Path, schedule: str, virtual_stages: int) -> None:
    save_tiny_model(tmp_path, num_layers=4, tied=True)
    parallel = ParallelConfig(pp=2, schedule=schedule, virtual_stages=virtual_stages, dp_shard=2)
    assert_exact(differences(ranks, tmp_path, Case(parallel, rows=(3, 5))))


def test_thirteen_stages_of_2_layers_and_one_of_1(ranks: Ranks, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=27)
    layers = (2,) * 13 + (1,)
    parallel = ParallelConfig(pp=2, schedule="Interleaved1F1B", virtual_stages=7, layers_per_stage=layers)
    assert_exact(differences(ranks, tmp_path, Case(parallel, rows=(3, 2))))


def test_four_stages_of_7_6_8_and_6_layers(ranks: Ranks, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=27)
    assert_exact(differences(ranks, tmp_path, Case(ParallelConfig(pp=4, layers_per_stage=(7, 6, 8, 6)), rows=(5, 2))))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_two_data_ranks_by_two_stages_with_different_data(
    ranks: Ranks, tmp_path: Path, family: str, tied: bool
) -> None:
    save_tiny_model(tmp_path, family, tied=tied)
    assert_exact(differences(ranks, tmp_path, Case(ParallelConfig(pp=2, dp_shard=2))))


def test_two_data_ranks_without_a_pipeline(ranks: Ranks, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tied=True)
    assert_exact(differences(ranks, tmp_path, Case(ParallelConfig(dp_shard=2))))


def test_replicas_of_sharded_groups(ranks: Ranks, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    assert_exact(differences(ranks, tmp_path, Case(ParallelConfig(dp_shard=2, dp_replicate=2))))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("pp", [1, 2])
def test_classes_of_nemo_automodel(ranks: Ranks, tmp_path: Path, pp: int, family: str, tied: bool) -> None:
    save_tiny_model(tmp_path, family, tied=tied, dtype=torch.float32)
    case = Case(ParallelConfig(pp=pp), rows=(3,), dtype="float32", implementation="nemo_automodel")
    found = differences(ranks, tmp_path, case)
    assert found.first_loss < 1e-5, found
    assert found.first_gradient < 1e-5, found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("pp", [1, 2])
def test_first_step_in_float32(ranks: Ranks, tmp_path: Path, pp: int, family: str) -> None:
    save_tiny_model(tmp_path, family, dtype=torch.float32)
    found = differences(ranks, tmp_path, Case(ParallelConfig(pp=pp), rows=(3,), dtype="float32"))
    assert found.first_loss < 1e-6, found
    assert found.first_norm < 1e-5, found


@pytest.mark.parametrize(
    ("fault", "parallel"),
    [
        ("documents see each other", ParallelConfig(pp=1)),
        ("documents see each other", ParallelConfig(pp=2)),
        ("tied gradient counted once", ParallelConfig(pp=2)),
        ("mean over data ranks", ParallelConfig(pp=2, dp_shard=2)),
        ("local token counts", ParallelConfig(pp=2, dp_shard=2)),
        ("norm of one stage", ParallelConfig(pp=2)),
    ],
)
def test_planted_bugs_are_noticed(ranks: Ranks, tmp_path: Path, fault: str, parallel: ParallelConfig) -> None:
    save_tiny_model(tmp_path, tied="tied" in fault)
    found = differences(ranks, tmp_path, Case(parallel, rows=(3,)), fault)
    assert max(found.loss, found.norm, found.gradient, found.logprob, found.weight) > 1e-3, found
