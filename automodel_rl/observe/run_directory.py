"""The run directory: whose run it holds, and where its files are."""

import os
import re
import shutil
from pathlib import Path

import yaml

from automodel_rl.config import Section, differing_keys, dump_config
from automodel_rl.errors import InputError
from automodel_rl.files import write_complete

STEP_FOLDER = re.compile(r"step_(\d+)")

MAY_DIFFER = ("length.steps", "length.epochs", "output", "observe.", "parallel", "modules")
"""How keys begin in which a resumed run may differ: its limits, where its folder lies, what it shows, its layout."""


class RunDirectory:
    """Files of one run.

    Args:
        config: the run.
        output: its folder.
        resume: whether to go on with the run that is there.

    Raises:
        InputError: the folder cannot be used, holds another run, or this one and `resume` is not set.
    """

    def __init__(self, config: Section, output: str, resume: bool):
        self.folder = Path(output)
        self.config_text = dump_config(config)
        self._check_place()
        if self.config_file.is_file():
            self._check_run(resume)
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise InputError(f"output={output}: the folder holds files that are not a run's: choose another")

    def _check_place(self) -> None:
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise InputError(f"output={self.folder}: {existing} is not a folder one can write to: choose another")

    def _check_run(self, resume: bool) -> None:
        there, given = yaml.safe_load(self.config_file.read_text()), yaml.safe_load(self.config_text)
        other = [key for key in differing_keys(there, given) if not key.startswith(MAY_DIFFER)]
        if other:
            raise InputError(
                f"output={self.folder}: the folder holds another run (it differs in {', '.join(other[:5])}): choose "
                "another folder, or use that run's config to resume it"
            )
        if not resume:
            raise InputError(
                f"output={self.folder}: the folder holds this run already: add --resume auto, or choose another"
            )
        if self.final.exists() and not self.list_checkpoints():
            raise InputError(
                f"output={self.folder}: this run is finished and has no checkpoint to go on from: choose another folder"
            )

    def create(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_complete(self.config_file, self.config_text)
        except OSError as error:
            raise InputError(f"output={self.folder}: cannot write there ({error.strerror}): choose another") from None

    def list_checkpoints(self) -> list[Path]:
        """The finished `step_N` folders, oldest first."""
        numbered = {path: STEP_FOLDER.fullmatch(path.name) for path in self.checkpoints.glob("step_*")}
        steps = {path: int(match[1]) for path, match in numbered.items() if match}
        return sorted(steps, key=lambda path: steps[path])

    def keep_checkpoints(self, keep: set[Path]) -> None:
        """Removes all other checkpoints, and what killed runs left unfinished."""
        for path in self.list_checkpoints():
            if path not in keep:
                path.rename(path.with_name(f".{path.name}.removed"))  # a folder half removed must not look whole
        for path in self.checkpoints.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def rollouts(self) -> Path:
        return self.folder / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def final(self) -> Path:
        return self.folder / "final"
