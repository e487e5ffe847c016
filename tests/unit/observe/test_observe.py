"""Metrics, report and run directory."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from automodel_rl.config.algorithms import SFTConfig
from automodel_rl.errors import InputError
from automodel_rl.observe.metrics import MetricsFile, read_lines
from automodel_rl.observe.run_directory import RunDirectory


def make_config(output: Path, **changes: object) -> SFTConfig:
    values = {
        "output": str(output),
        "model": {"path": "m"},
        "data": {"train": [{"path": "a.jsonl"}]},
        "batch": {"sequences": 8, "microbatch_tokens": 64},
        "length": {"steps": 3},
    }
    return SFTConfig.model_validate(values | changes)


def test_metrics_of_steps_that_run_again_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    for step in (1, 2, 3):
        metrics.write({"step": step})
    with path.open("a") as file:
        file.write('{"step": 4, "tra')  # a killed run
    MetricsFile(path, 2).write({"step": 3, "again": True})
    assert read_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_metrics_of_the_untrained_model_are_there_once(tmp_path: Path) -> None:
    for _ in range(2):
        MetricsFile(tmp_path / "metrics.jsonl", 0).write({"step": 0})
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 0}]
    MetricsFile(tmp_path / "metrics.jsonl", 1).write({"step": 2})
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 0}, {"step": 2}]


def test_a_folder_is_used_by_its_own_run_only(tmp_path: Path) -> None:
    output = tmp_path / "run"
    config = make_config(output)
    RunDirectory(config, str(output), resume="never").create(3)
    MetricsFile(output / "metrics.jsonl", 0).write({"step": 1})
    with pytest.raises(InputError, match="already holds this run: add --resume auto"):
        RunDirectory(config, str(output), resume="never")
    changed = make_config(output, length={"steps": 9}, observe={"trackers": ["tensorboard"]})
    RunDirectory(changed, str(output), resume="auto")
    for resume in ("auto", "never"):
        with pytest.raises(InputError, match=r"holds another run \(it differs in seed\)"):
            RunDirectory(make_config(output, seed=5), str(output), resume)


def test_a_run_of_an_earlier_version_goes_on_with_the_defaults_of_new_keys(tmp_path: Path) -> None:
    output = tmp_path / "run"
    config = make_config(output)
    RunDirectory(config, str(output), resume="never").create(3)
    MetricsFile(output / "metrics.jsonl", 0).write({"step": 1})
    values = yaml.safe_load((output / "config.yaml").read_text())
    del values["seed"], values["model"]["fp8"]
    (output / "config.yaml").write_text(yaml.safe_dump(values))
    assert RunDirectory(config, str(output), resume="auto").changes == []
    with pytest.raises(InputError, match=r"holds another run \(it differs in seed\)"):
        RunDirectory(make_config(output, seed=5), str(output), resume="auto")


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="holds files that do not belong to a run"):
        RunDirectory(make_config(tmp_path), str(tmp_path), resume="never")


def begin(output: Path) -> RunDirectory:
    """A run that has measured the untrained model and ended in its first step."""
    directory = RunDirectory(make_config(output), str(output), resume="never")
    directory.create(3)
    MetricsFile(directory.metrics, 0).write({"step": 0})
    for left in (directory.flights, directory.not_finite, directory.rollouts):
        left.mkdir()
    return directory


def test_a_run_that_finished_no_step_gives_way_to_any_other(tmp_path: Path) -> None:
    assert not begin(tmp_path / "run").replaces_empty_run
    for resume in ("never", "auto"):
        assert RunDirectory(make_config(tmp_path / "run", seed=5), str(tmp_path / "run"), resume).replaces_empty_run
    (tmp_path / "bare" / "checkpoints").mkdir(parents=True)  # it ended before it had written its config
    assert RunDirectory(make_config(tmp_path / "bare"), str(tmp_path / "bare"), resume="never").replaces_empty_run


@pytest.mark.parametrize(
    "result", ["checkpoints/step_1", "checkpoints/step_1.damaged", "checkpoints/.step_1.unfinished", "final"]
)
def test_a_run_with_a_result_is_kept(tmp_path: Path, result: str) -> None:
    begin(tmp_path)
    (tmp_path / result).mkdir()
    with pytest.raises(InputError, match="already holds this run"):
        RunDirectory(make_config(tmp_path), str(tmp_path), resume="never")


def test_a_config_of_somebody_in_the_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 7\n")
    with pytest.raises(InputError, match="holds another run"):
        RunDirectory(make_config(tmp_path), str(tmp_path), resume="never")


@contextlib.contextmanager
def locked(file: Path, kind: str) -> Iterator[None]:
    """Another process holds a lock on the file."""
    lines = f"import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.{kind}); print(); input()"
    command = [sys.executable, "-c", lines, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield
        other.kill()


def test_a_run_that_is_at_work_is_left_alone_whatever_is_asked(tmp_path: Path) -> None:
    begin(tmp_path).unlock()
    early = RunDirectory(make_config(tmp_path, seed=5), str(tmp_path), resume="auto")  # it has looked before
    before = early.config_file.read_text()
    with locked(tmp_path / ".in_use", "LOCK_EX"):
        for resume in ("never", "auto", str(tmp_path / "checkpoints" / "step_1")):
            with pytest.raises(InputError, match="in use by another run .*: wait for it or end it, or choose another"):
                RunDirectory(make_config(tmp_path), str(tmp_path), resume)
        for work in (early.lock, lambda: early.create(3)):
            with pytest.raises(InputError, match="in use by another run"):
                work()
    assert early.config_file.read_text() == before
    assert RunDirectory(make_config(tmp_path), str(tmp_path), resume="never").replaces_empty_run


def test_ranks_that_look_at_the_same_time_see_the_same(tmp_path: Path) -> None:
    begin(tmp_path).unlock()
    with locked(tmp_path / ".in_use", "LOCK_SH"):  # as another rank does while it looks
        assert RunDirectory(make_config(tmp_path), str(tmp_path), resume="never").replaces_empty_run


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "with a checkpoint"])
def test_a_run_that_is_past_its_end_is_refused(tmp_path: Path, finished: bool) -> None:
    directory = begin(tmp_path)
    if finished:
        directory.final.mkdir()
        directory.note_finished(10)
    else:
        (directory.checkpoints / "step_9").mkdir()
        (directory.checkpoints / "step_10").mkdir()
    for length in ({"steps": 9}, {"epochs": 0.5}):
        config = make_config(tmp_path, length=length)
        given = "length.steps=9" if "steps" in length else "length.epochs=0.5, which is 9 steps"
        with pytest.raises(InputError, match=f"^{given}: the run in output={tmp_path} is already at step 10"):
            RunDirectory(config, str(tmp_path), resume="auto").check_length(9)
    RunDirectory(make_config(tmp_path, length={"steps": 10}), str(tmp_path), resume="auto")


def test_a_run_is_finished_when_its_model_is_of_its_last_step(tmp_path: Path) -> None:
    directory = RunDirectory(make_config(begin(tmp_path).folder), str(tmp_path), resume="auto")
    directory.note_finished(3)
    assert not directory.is_finished(3)  # the model is gone
    directory.final.mkdir()
    assert directory.is_finished(3)
    assert not directory.is_finished(4)
    went_on = directory.checkpoints / "step_4"
    went_on.mkdir()
    assert not directory.is_finished(3)
    went_on.rmdir()
    with pytest.raises(InputError, match="finished and has no checkpoint to resume from"):
        directory.check_length(4)


def test_metrics_are_json_lines_in_which_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    record = {"step": 1, "perf/mfu": None, "train/loss": float("nan"), "train/grad_norm": float("inf")}
    MetricsFile(tmp_path / "m.jsonl", 0).write(record)
    written = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
    assert written == {"step": 1, "perf/mfu": None, "train/loss": None, "train/grad_norm": None}
