"""Which checkpoints of a run are kept."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.policy.policy_rank import CheckpointStatus
from automodel_rl.trainers.further_checkpoints import FurtherCheckpoints
from automodel_rl.trainers.run_checkpoints import RunCheckpoints, _Checkpoint
from tests.unit.observe.test_observe import make_config


def checkpoints_of(folder: Path, higher_is_better: bool, **settings: Any) -> RunCheckpoints:
    """Those of a run without ranks."""
    config = make_config(folder, checkpoint=settings)
    checkpoints = object.__new__(RunCheckpoints)
    checkpoints.config, checkpoints.directory = config.checkpoint, RunDirectory(config, str(folder), resume="never")
    checkpoints.sign, checkpoints.best = 1 if higher_is_better else -1, None
    no_policy: Any = None
    checkpoints.further = FurtherCheckpoints(no_policy, {}, checkpoints.directory.checkpoints, {})
    checkpoints._export = checkpoints._in_flight = checkpoints._warning = checkpoints._cleanup_thread = None
    checkpoints.unmeasured_step, checkpoints._selection_lock = None, threading.Lock()
    return checkpoints


@pytest.mark.parametrize(
    ("settings", "best", "kept"),
    [
        ({"keep_last": 2, "keep_best": False}, 3, [9, 10]),
        ({"keep_last": 2, "keep_best": True}, 3, [3, 9, 10]),
        ({"keep_last": 2, "keep_best": True}, 10, [9, 10]),
        ({"keep_last": 1, "keep_best": True}, None, [10]),
        ({"keep_last": 9, "keep_best": True}, 8, [3, 8, 9, 10]),
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path: Path, settings: dict, best: int | None, kept: list[int]) -> None:
    checkpoints = checkpoints_of(tmp_path, True, **settings)
    for step in (3, 8, 9, 10, 11):  # the next one may be begun
        (checkpoints.directory.checkpoints / f"step_{step}").mkdir(parents=True)
    known: Any = None if best is None else {"step": best, "metric": 0.5}
    assert checkpoints._keep_chosen(_Checkpoint(checkpoints.directory.checkpoints / "step_10", known)) is None
    found = {path.name for path in checkpoints.directory.checkpoints.iterdir()}
    assert found == {f"step_{step}" for step in (*kept, 11)}
    assert [path.name for path in checkpoints.directory.list_checkpoints()] == [f"step_{s}" for s in (*kept, 11)]


@pytest.mark.parametrize(("higher_is_better", "better"), [(True, 0.75), (False, 0.25)])
def test_the_best_is_by_the_trainers_own_direction(tmp_path: Path, higher_is_better: bool, better: float) -> None:
    checkpoints = checkpoints_of(tmp_path, higher_is_better)
    assert checkpoints._is_better(0.5, checkpoints.best)
    checkpoints.best = {"step": 1, "metric": 0.5}
    assert [value for value in (0.25, 0.5, 0.75) if checkpoints._is_better(value, checkpoints.best)] == [better]


class Ranks:
    """Ranks whose checkpoints are written as soon as somebody waits for them.

    Args:
        folder: the folder of checkpoints.
        fails: names of those that cannot be written.
    """

    def __init__(self, folder: Path, fails: Sequence[str] = ()) -> None:
        self.saved: list[dict] = []
        self._folder, self._fails = folder, fails

    def ask(self, method: str, *arguments: Any) -> Any:
        if method == "save_checkpoint":
            self.saved.append(arguments[1])
            return None
        assert method == "checkpoint_status"
        name = f"step_{self.saved[-1]['step']}"
        if name in self._fails:
            return CheckpointStatus(True, "No space left on device", 0.0)
        (self._folder / name).mkdir(parents=True, exist_ok=True)
        return CheckpointStatus(True, None, 0.0)


@pytest.mark.parametrize("fails", [(), ("step_4",)], ids=["all are written", "one is not"])
def test_a_step_is_kept_until_its_metric_is_known_and_may_be_the_best(tmp_path: Path, fails: Sequence[str]) -> None:
    checkpoints: Any = checkpoints_of(tmp_path, True, keep_last=1)
    ranks = Ranks(checkpoints.directory.checkpoints, fails)
    checkpoints.initial_fingerprint, checkpoints._ask = "", ranks.ask
    checkpoints.save(2, {}, 0.5)
    checkpoints.unmeasured_step = 3
    assert [step for step in (2, 3, 4) if checkpoints.is_unmeasured(step)] == [3]
    for step in (3, 4):
        checkpoints.save(step, {}, None)
    checkpoints.record_metric(3, 0.9)  # while that of step 4 is being written
    checkpoints.save(5, {}, 0.7)
    checkpoints.finish()
    assert checkpoints.best == {"step": 3, "metric": 0.9}
    assert {path.name for path in checkpoints.directory.checkpoints.iterdir()} == {"step_3", "step_5"}
    assert ranks.saved[-1]["best"] == {"step": 3, "metric": 0.9}


def test_the_metric_of_an_earlier_step_ends_no_other_wait_and_is_not_the_best_without_a_checkpoint(
    tmp_path: Path,
) -> None:
    checkpoints: Any = checkpoints_of(tmp_path, True)
    checkpoints.directory.checkpoints.mkdir(parents=True)
    checkpoints.unmeasured_step = 6
    checkpoints.record_metric(4, 0.9)
    assert (checkpoints.unmeasured_step, checkpoints.best) == (6, None)


def test_a_metric_that_is_no_number_or_was_not_measured_is_not_the_best(tmp_path: Path) -> None:
    checkpoints: Any = checkpoints_of(tmp_path, False)
    ranks = Ranks(checkpoints.directory.checkpoints)
    checkpoints.initial_fingerprint, checkpoints._ask = "", ranks.ask
    checkpoints.directory.checkpoints.mkdir(parents=True)
    for step, metric in enumerate((None, 0.5, float("nan"), 0.75, 0.25, None), start=1):
        checkpoints.save(step, {}, metric)
    assert [None if one["best"] is None else one["best"]["step"] for one in ranks.saved] == [
        None,
        2,
        2,
        2,
        5,
        5,
    ]
