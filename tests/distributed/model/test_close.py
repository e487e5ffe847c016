"""Models that one process loads one after the other leave no threads and connections behind."""

import os
from pathlib import Path
from typing import Any

import pytest

from automodel_rl import Engine, ModelHandle, OptimizerConfig, ParallelConfig, sft_loss
from automodel_rl.batch import pack_microbatch
from automodel_rl.config.components import ComponentsConfig
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model, save_tiny_multimodal_model


def counts_after_models(folder: Path, layout: dict[str, Any], num_models: int, trained: bool) -> list[tuple[int, int]]:
    """Numbers of this process's threads and open files after each model."""
    counts = []
    for _ in range(num_models):
        with ModelHandle.from_pretrained(str(folder), **layout) as handle:
            if trained:
                engine = Engine(handle, OptimizerConfig(lr=1e-3, decay="constant"))
                engine.train_step([pack_microbatch(make_sequences(2, seed=n)) for n in range(2)], sft_loss)
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return counts


def assert_steady(counts: list[tuple[int, int]]) -> None:
    """A model that is not closed keeps some ten of each. The first two load what stays."""
    (_, early, *_, last) = counts
    assert last[0] <= early[0] + 2, counts
    assert last[1] <= early[1] + 2, counts


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(), ParallelConfig(pp=2, virtual_stages=2, schedule="Interleaved1F1B")], ids=str
)
def test_models_that_are_closed_leave_no_threads_and_files(
    ranks: RankPool, tmp_path: Path, parallel: ParallelConfig
) -> None:
    save_tiny_model(tmp_path)
    for counts in ranks(parallel.world_size).run(counts_after_models, tmp_path, {"parallel": parallel}, 4, True):
        assert_steady(counts)


def test_components_that_are_closed_leave_no_threads_and_files(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path, "qwen3_vl")
    components = ComponentsConfig.model_validate({"language": {"ranks": "1"}, "vision": {"ranks": "0"}})
    for counts in ranks(2).run(counts_after_models, tmp_path, {"components": components}, 4, False):
        assert_steady(counts)
