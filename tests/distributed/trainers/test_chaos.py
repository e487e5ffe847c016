"""Killed at any moment, also while it saves, a run goes on to the weights of one that nobody disturbed."""

import random
from pathlib import Path

import pytest

from tests.chaos import Kill, chaos_settings, check_undisturbed, disturb
from tests.distributed.trainers.runs import train
from tests.rank_pool import RankPool

KILLS = {
    "sft": Kill("training", "launcher", 0.05, 2),
    "grpo": Kill("saving", "all ranks", 0.006, 2),
}
"""Some of what `make chaos` does to every algorithm."""


@pytest.mark.parametrize("algorithm", KILLS)
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(
    ranks: RankPool, workspace: Path, tmp_path: Path, algorithm: str
) -> None:
    settings = chaos_settings(algorithm, workspace, tmp_path / "run")
    settings["length"] = {"steps": 11}
    ranks(2).run(train, settings | {"output": str(tmp_path / "whole")})
    assert disturb(algorithm, settings, tmp_path, KILLS[algorithm], random.Random(0)), "it had ended before"
    ranks(2).run(train, settings, "auto")
    check_undisturbed(settings, tmp_path / "whole")
