"""Trackers get the records of metrics.jsonl."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from automodel_rl.config import ObserveConfig
from automodel_rl.errors import InputError
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.observe.trackers import check_trackers, make_trackers
from tests.unit.observe.test_observe import make_config


def test_tensorboard_has_every_number_and_a_resumed_run_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", observe={"trackers": ["tensorboard"]})
    directory = RunDirectory(config, config.output, resume="never")
    directory.create(3)
    for first, losses in ((0, {1: 3.0, 2: 2.0}), (1, {2: 2.5, 3: 0.0})):  # the second step runs again
        (tracker,) = make_trackers(config.observe, directory, first)
        for step, loss in losses.items():
            tracker.write({"step": step, "train/loss": loss, "perf/mfu": None})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 3.0), (2, 2.5), (3, 0.0)]


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="observe.trackers: wandb is not installed: pip install 'wandb'"):
        check_trackers(ObserveConfig(trackers=("wandb",)))
