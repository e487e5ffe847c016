"""Generators that only evaluate: they find what validation as usual finds, and training does not wait for it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.observe.metrics import MEASURED, step_of_metric
from automodel_rl.report.run_data import read_run
from tests.distributed.trainers.runs import Settings, metrics_of, num_lines, settings_of, train
from tests.fleet_chaos import check_undisturbed, generator_of, run_of
from tests.rank_pool import RankPool

STEPS, EVERY = 7, 3


def usual_settings(workspace: Path, output: Path) -> Settings:
    """A run that validates by itself, and whose best checkpoint is of its first validation."""
    settings = settings_of("grpo", workspace, output)
    settings["length"] = {"steps": STEPS, "validate_every": EVERY}
    settings["optimizer"]["lr"] = 1e-4
    settings["rollout"] |= {"validation_samples": 2, "validation_temperature": 1.0}
    settings["checkpoint"] = {"every_steps": 2, "keep_last": 1}
    return settings


def evaluated_settings(workspace: Path, output: Path) -> Settings:
    """The same run with evaluators."""
    settings = usual_settings(workspace, output)
    settings["weight_sync"] = {"publish": str(output.with_name("weights")), "check_every": 0}
    settings["rollout"]["generator"] = {"kind": "joined", "evaluators": 1}
    return settings


@pytest.fixture(scope="module")
def usual(ranks: RankPool, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("usual") / "run"
    ranks(1).run(train, usual_settings(workspace, output))
    return output


def found_in(run: Path) -> dict[int, dict[str, Any]]:
    """What validation has found, by the step whose weights wrote."""
    found = {}
    for record in metrics_of(run):
        validation = {name: value for name, value in record.items() if name.startswith("val/") and name != MEASURED}
        if validation:
            found[step_of_metric(record, "val/")] = validation
    return found


def best_of(run: Path) -> dict[str, Any]:
    newest = max((run / "checkpoints").iterdir(), key=lambda folder: int(folder.name.removeprefix("step_")))
    best: dict[str, Any] = json.loads((newest / "progress.json").read_text())["best"]
    return best


def check_as_usual(run: Path, usual: Path) -> None:
    check_undisturbed(run, usual)
    assert found_in(run) == found_in(usual)
    assert best_of(run) == best_of(usual)
    folder = run / "checkpoints" / f"step_{best_of(run)['step']}"
    assert folder.is_dir()


def test_they_find_what_validation_as_usual_finds_while_training_goes_on(
    workspace: Path, tmp_path: Path, usual: Path
) -> None:
    settings = evaluated_settings(workspace, tmp_path / "run")
    with run_of(settings, tmp_path) as run, generator_of(settings) as generator:
        with generator_of(settings, "--evaluate") as evaluator:
            assert run.finish() == 0, run.stdout + run.stderr
            assert evaluator.finish() == generator.finish() == 0, evaluator.stderr + generator.stderr
            assert "has joined, for evaluations" in run.stdout
    check_as_usual(tmp_path / "run", usual)
    beside = [
        record for record in metrics_of(tmp_path / "run") if record.get(MEASURED, record["step"]) < record["step"]
    ]
    assert {record[MEASURED] for record in beside} == {3}
    samples = {path.name for path in (tmp_path / "run" / "samples").iterdir()}
    assert samples == {path.name for path in (usual / "samples").iterdir()}
    curve = read_run(tmp_path / "run")["series"]["val/reward_mean"]
    assert curve[0] == [0, 3, 6, 7]


@pytest.mark.parametrize(
    "every_steps", [1, 100]
)  # the newest checkpoint is of a later step, or of the one that validates
def test_an_evaluator_and_a_run_that_are_killed_lose_no_validation(
    workspace: Path, tmp_path: Path, usual: Path, every_steps: int
) -> None:
    settings = evaluated_settings(workspace, tmp_path / "run")
    settings["checkpoint"] = {"every_steps": every_steps, "keep_last": 1}
    with generator_of(settings) as generator:
        kill_while_a_validation_is_underway(settings, tmp_path)
        with run_of(settings, tmp_path, "--resume", "auto") as run, generator_of(settings, "--evaluate") as second:
            assert run.finish() == 0, run.stdout + run.stderr
            assert second.finish() == generator.finish() == 0, second.stderr + generator.stderr
    assert {record[MEASURED] for record in metrics_of(tmp_path / "run") if MEASURED in record} == {0, 3, 6, 7}
    check_undisturbed(tmp_path / "run", usual)
    assert found_in(tmp_path / "run") == found_in(usual)
    assert best_of(tmp_path / "run") == best_of(usual)


def kill_while_a_validation_is_underway(settings: Settings, folder: Path) -> None:
    """Step 3 validates, and nobody evaluates it before the run is killed."""
    run_folder = folder / "run"
    with run_of(settings, folder) as run:
        with generator_of(settings, "--evaluate") as first:
            assert run.wait_until(lambda: num_lines(run_folder / "metrics.jsonl") >= 2), run.stdout + run.stderr
            first.process.kill()
            first.finish()
        newest = f"step_{4 if settings['checkpoint']['every_steps'] == 1 else 3}"
        assert run.wait_until(lambda: (run_folder / "checkpoints" / newest).is_dir()), run.stdout + run.stderr
        assert run.wait_until(lambda: num_lines(run_folder / "metrics.jsonl") >= 5), run.stdout + run.stderr


def test_a_validation_whose_weights_are_gone_is_left_out_with_a_warning(workspace: Path, tmp_path: Path) -> None:
    settings = evaluated_settings(workspace, tmp_path / "run")
    settings["checkpoint"] = {"every_steps": 1, "keep_last": 1}
    with generator_of(settings):
        kill_while_a_validation_is_underway(settings, tmp_path)
    for version in (tmp_path / "weights").glob("0*"):
        shutil.rmtree(version)
    with generator_of(settings), generator_of(settings, "--evaluate"):
        with run_of(settings, tmp_path, "--resume", "auto") as run:
            assert run.finish() == 0, run.stdout + run.stderr
            warning = f"warning: the validation of step 3 is skipped: {tmp_path / 'weights'} no longer has its weights"
            assert warning in run.stdout
    assert {*found_in(tmp_path / "run")} == {0, 6, 7}


def test_evaluators_without_something_to_evaluate_are_refused(workspace: Path, tmp_path: Path) -> None:
    settings = evaluated_settings(workspace, tmp_path / "run")
    settings["data"].pop("validation")
    with run_of(settings, tmp_path) as run:
        assert run.finish() == 2
        assert "rollout.generator.evaluators=1 without data.validation" in run.stderr
