"""Paths of a run's files, and the state they reveal."""

import re
from pathlib import Path

from automodel_rl.launch.record import FAILURE_FILE
from automodel_rl.observe.run_lock import find_liveness

FLIGHTS = "flight"
"""Folder with the flight recorders' files, and with the failure that ended the run."""

STEP_FOLDER = re.compile(r"step_(\d+)")


class RunFiles:
    """The files in a run's folder, whether or not the run has started."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def versions(self) -> Path:
        return self.folder / "versions.json"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def phase(self) -> Path:
        """What the run is doing, in words."""
        return self.folder / "phase.txt"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def rollouts(self) -> Path:
        return self.folder / "rollouts"

    @property
    def timelines(self) -> Path:
        """Folder with each step's timeline of trainer, rewards and generators."""
        return self.folder / "timelines"

    @property
    def environments(self) -> Path:
        return self.folder / "environments"

    @property
    def samples(self) -> Path:
        """Folder with a few completions of held-out prompts, by step."""
        return self.folder / "samples"

    @property
    def examples(self) -> Path:
        """Folder with a few training sequences, by the step before which they were written."""
        return self.folder / "examples"

    @property
    def flights(self) -> Path:
        return self.folder / FLIGHTS

    @property
    def failure(self) -> Path:
        """The error that ended the run early, as shown on the console."""
        return self.flights / FAILURE_FILE

    @property
    def not_finite(self) -> Path:
        """Folder with the microbatches of a step at which training diverged."""
        return self.folder / "not_finite"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def final(self) -> Path:
        return self.folder / "final"

    @property
    def finished_file(self) -> Path:
        """File with a finished run's number of steps, to which `final/` and the report belong."""
        return self.folder / ".finished_after"

    @property
    def total_steps_file(self) -> Path:
        """File with the run's number of steps, which the config may give in epochs."""
        return self.folder / ".total_steps"

    @property
    def lock_file(self) -> Path:
        """File that a run locks while it uses the folder (observe/run_lock.py)."""
        return self.folder / ".in_use"

    @property
    def finished_after(self) -> int | None:
        """The step after which `final/` was written; None without `final/`, or if the step is unknown."""
        return read_number(self.finished_file) if self.final.exists() else None

    def is_in_use(self) -> bool:
        return find_liveness(self.lock_file) is not None

    def list_checkpoints(self) -> list[Path]:
        """Returns the folders of checkpoints, complete or not, oldest first."""
        return sorted(
            (path for path in self.checkpoints.glob("step_*") if STEP_FOLDER.fullmatch(path.name)), key=step_of
        )


def step_of(checkpoint: Path) -> int:
    match = STEP_FOLDER.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def read_number(file: Path) -> int | None:
    text = file.read_text() if file.is_file() else ""
    return int(text) if text.isdecimal() else None
