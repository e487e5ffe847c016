"""The run directory: whose run it holds, and where its files are."""

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml

from automodel_rl.checkpoint.folder import is_complete, read_marker
from automodel_rl.config import Section, differing_keys, dump_config
from automodel_rl.errors import InputError
from automodel_rl.files import write_complete

FLIGHTS = "flight"
"""Folder of the flight recorders' files in a run directory."""

AGENT_VARIABLE, AGENT_FILE = "TORCHELASTIC_RUN_ID", ".started_by"
"""Where torchrun names a job, and where a run keeps that name."""

STEP_FOLDER = re.compile(r"step_(\d+)")

MAY_DIFFER = ("length.steps", "length.epochs", "output", "observe.", "parallel", "modules", "checkpoint.", "failures.")
"""How keys begin in which a resumed run may differ: its limits, where its folder lies, what it shows and keeps, its
layout."""


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    match = STEP_FOLDER.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


class RunDirectory:
    """Files of one run.

    Args:
        config: the run.
        output: its folder.
        resume: "auto" to go on with the run that is there, "never", or the folder of a checkpoint to go on from.

    Attributes:
        resume: the same, but "auto" where an agent has started this run again.

    Raises:
        InputError: the folder cannot be used, holds another run, this one and `resume` is "never", or one that is
            past the checkpoint.
    """

    def __init__(self, config: Section, output: str, resume: str):
        self.folder = Path(output)
        self.config_text = dump_config(config)
        self._check_place()
        if self.is_started_again:
            resume = "auto"
        self.resume = resume
        if self.config_file.is_file():
            self._check_run(resume)
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise InputError(f"output={output}: the folder holds files that are not a run's: choose another")

    def _check_place(self) -> None:
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise InputError(f"output={self.folder}: {existing} is not a folder one can write to: choose another")

    def _check_run(self, resume: str) -> None:
        there, given = yaml.safe_load(self.config_file.read_text()), yaml.safe_load(self.config_text)
        other = [key for key in differing_keys(there, given) if not key.startswith(MAY_DIFFER)]
        if other:
            raise InputError(
                f"output={self.folder}: the folder holds another run (it differs in {', '.join(other[:5])}): choose "
                "another folder, or use that run's config to resume it"
            )
        if resume == "never":
            raise InputError(
                f"output={self.folder}: the folder holds this run already: add --resume auto, or choose another"
            )
        if resume != "auto":
            self._check_past(Path(resume))
        elif self.final.exists() and not self.list_checkpoints():
            raise InputError(
                f"output={self.folder}: this run is finished and has no checkpoint to go on from: choose another folder"
            )

    def _check_past(self, checkpoint: Path) -> None:
        newer = [path for path in self.list_checkpoints() if step_of(path) > read_marker(checkpoint).step]
        if newer:
            raise InputError(
                f"--resume {checkpoint}: output={self.folder} holds {newer[-1].name}, which is past it: choose another "
                "output, or move the newer checkpoints away"
            )

    def create(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_complete(self.config_file, self.config_text)
            if AGENT_VARIABLE in os.environ:
                write_complete(self.folder / AGENT_FILE, os.environ[AGENT_VARIABLE])
        except OSError as error:
            raise InputError(f"output={self.folder}: cannot write there ({error.strerror}): choose another") from None

    @property
    def is_started_again(self) -> bool:
        """Whether the agent that starts this rank, torchrun, has started the run in this folder before."""
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            return True
        agent, file = os.environ.get(AGENT_VARIABLE, ""), self.folder / AGENT_FILE
        # Without a name of its own for the job torchrun calls it "none".
        return agent not in ("", "none") and file.is_file() and file.read_text() == agent

    def list_checkpoints(self) -> list[Path]:
        """The `step_N` folders, oldest first."""
        return sorted(
            (path for path in self.checkpoints.glob("step_*") if STEP_FOLDER.fullmatch(path.name)), key=step_of
        )

    def remove_checkpoints(self, folders: Sequence[Path]) -> None:
        """Removes some checkpoints."""
        for path in folders:
            path.rename(path.with_name(f".{path.name}.removed"))  # a folder half removed must not look whole
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Removes what killed runs left unfinished. Not while a checkpoint is being written."""
        for path in self.checkpoints.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def recover_checkpoints(self) -> None:
        """Gives complete checkpoints their names that a killed run had no time for."""
        for ending in ("unfinished", "old"):
            for path in self.checkpoints.glob(f".step_*.{ending}"):
                named = path.with_name(path.name.removeprefix(".").removesuffix(f".{ending}"))
                if is_complete(path) and not named.exists():
                    with contextlib.suppress(OSError):
                        path.rename(named)

    def set_aside(self, newer_than: Path) -> None:
        """Gives checkpoints that are damaged, and so were passed over, another name."""
        for path in self.list_checkpoints():
            if step_of(path) > step_of(newer_than):  # they would count as newer ones than those to come
                with contextlib.suppress(OSError):
                    path.rename(path.with_name(f"{path.name}.damaged"))

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

    def take_nccl_traces(self) -> None:
        """Lets NCCL's own flight recorder write here when a collective times out. Before NCCL is used."""
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(self.flights / "nccl_trace_rank_"))

    @property
    def flights(self) -> Path:
        """What ranks did last, while they run and after a failure."""
        return self.folder / FLIGHTS

    @property
    def not_finite(self) -> Path:
        """The rows of a step at which training has diverged."""
        return self.folder / "not_finite"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def final(self) -> Path:
        return self.folder / "final"
