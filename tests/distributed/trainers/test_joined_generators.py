"""Generators that join a run and leave it: nothing is lost, and the weights are those of an undisturbed run."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.distributed.trainers.runs import metrics_of, num_lines, train
from tests.fleet_chaos import (
    alone_settings,
    check_that_nothing_is_lost,
    check_undisturbed,
    generator_of,
    joined_settings,
    run_of,
)
from tests.processes import Job
from tests.rank_pool import RankPool

STEPS = 8


@pytest.fixture(scope="module")
def alone(ranks: RankPool, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rank generates."""
    output = tmp_path_factory.mktemp("alone") / "run"
    ranks(1).run(train, alone_settings(workspace, output, STEPS))
    return output


def test_they_may_join_leave_and_be_killed_while_a_run_goes_on(workspace: Path, tmp_path: Path, alone: Path) -> None:
    events = check_that_nothing_is_lost(tmp_path, workspace, alone, count=5, seed=3)
    assert {*events} == {"join", "kill", "leave"}


def test_a_generator_waits_for_a_run_that_was_killed_and_goes_on_with_it(
    workspace: Path, tmp_path: Path, alone: Path
) -> None:
    settings = joined_settings(workspace, tmp_path / "run", STEPS)
    with generator_of(settings) as generator:
        with run_of(settings, tmp_path) as run:
            assert run.wait_until(lambda: num_lines(tmp_path / "run" / "metrics.jsonl") >= 3)
        assert generator.wait_until(lambda: "lost the connection to the run" in generator.stdout)
        with run_of(settings, tmp_path, "--resume", "auto") as run:
            assert run.finish() == 0, run.stdout + run.stderr
        assert generator.finish() == 0
        assert "the run has ended" in generator.stdout
    assert len(metrics_of(tmp_path / "run")) == STEPS
    check_undisturbed(tmp_path / "run", alone)


def test_one_that_shares_nothing_but_a_key_reads_weights_over_http(
    workspace: Path, tmp_path: Path, alone: Path
) -> None:
    settings = joined_settings(workspace, tmp_path / "run", STEPS)
    settings["rollout"]["generator"] |= {"key": str(tmp_path / "key"), "weights_port": 0}
    generate = [sys.executable, "-m", "automodel_rl", "generate", "--key", str(tmp_path / "key"), "--join"]
    with run_of(settings, tmp_path) as run:
        assert run.wait_until(lambda: re.search(r"or --join localhost:\d+ --key", run.stdout) is not None)
        (address,) = re.findall(r"or --join (localhost:\d+) --key", run.stdout)
        with Job([*generate, address]) as generator:
            assert run.finish() == 0, run.stdout + run.stderr
            assert generator.finish() == 0, generator.stderr
            assert "the run has ended" in generator.stdout
    check_undisturbed(tmp_path / "run", alone)
    written = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_3.jsonl").read_text().splitlines()]
    assert {(one["generator"], one["staleness"]) for one in written} == {("joined generator 0", 0)}
    with Job([*generate, address, "--wait", "0.001"]) as late:
        assert late.finish() == 2
        assert re.fullmatch(rf"error: --join {address}: the run cannot be reached .*\n", late.stderr)
