"""The places of a run's files, and what they say of the run."""

from pathlib import Path

from automodel_rl.launch.record import FAILURE_FILE
from automodel_rl.observe.run_lock import sign_of_life

FLIGHTS = "flight"
"""Name of the folder with the flight recorders' files, and with the failure that ended the run."""


class RunFiles:
    """The files of a run, whether it has begun or not.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def versions(self) -> Path:
        """Versions of libraries, machine and start time, as JSON."""
        return self.folder / "versions.json"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def rollouts(self) -> Path:
        """Folder with the completions of each step."""
        return self.folder / "rollouts"

    @property
    def timelines(self) -> Path:
        """Folder that says who worked when in each step."""
        return self.folder / "timelines"

    @property
    def environments(self) -> Path:
        """What environments print."""
        return self.folder / "environments"

    @property
    def samples(self) -> Path:
        """Folder with a few completions of held-out prompts, by step."""
        return self.folder / "samples"

    @property
    def examples(self) -> Path:
        """Folder with a few sequences of the training data, by the step before which they were written."""
        return self.folder / "examples"

    @property
    def flights(self) -> Path:
        """Folder that says what each rank did last, while it runs and after a failure."""
        return self.folder / FLIGHTS

    @property
    def failure(self) -> Path:
        """What ended the run before its last step, as it was shown on the console."""
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
        """File in which a finished run keeps the number of its steps: `final/` and the report are from the last."""
        return self.folder / ".finished_after"

    @property
    def total_steps_file(self) -> Path:
        """File with the run's number of steps, which its config may give in epochs."""
        return self.folder / ".total_steps"

    @property
    def lock_file(self) -> Path:
        """File that a run locks while it works in the folder (observe/run_lock.py)."""
        return self.folder / ".in_use"

    @property
    def finished_after(self) -> int | None:
        """The step after which `final/` was written; None if there is no `final/`, or its step is not known."""
        return read_number(self.finished_file) if self.final.exists() else None

    def is_in_use(self) -> bool:
        """Whether a run of another process is at work here."""
        return sign_of_life(self.lock_file) is not None


def read_number(file: Path) -> int | None:
    """The number in a file; None if there is none."""
    text = file.read_text() if file.is_file() else ""
    return int(text) if text.isdecimal() else None
