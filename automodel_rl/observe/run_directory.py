"""The run directory: whose run it holds, and where its files are."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from automodel_rl.checkpoint.folder import is_complete, read_marker
from automodel_rl.config import RunConfig, differing_keys, dump_config
from automodel_rl.errors import InputError
from automodel_rl.files import write_complete
from automodel_rl.observe.metrics import read_metrics

FLIGHTS = "flight"
"""Folder of the flight recorders' files in a run directory."""

AGENT_VARIABLE, AGENT_FILE = "TORCHELASTIC_RUN_ID", ".started_by"
"""Where torchrun names a job, and where a run keeps that name."""

FINISHED_FILE = ".finished_after"
"""Where a finished run keeps the number of its steps, of which `final/` and the report are."""

LOCK_FILE = ".in_use"
"""Locked by the run that is at work in a folder; the lock ends with its process, however it ends."""

FIRST_FILES = {"checkpoints", ".config.yaml.unfinished"}
"""What a run makes before its config.yaml is complete."""

STEP_FOLDER = re.compile(r"step_(\d+)")

MAY_DIFFER = (
    "length.steps",
    "length.epochs",
    "output",
    "observe.",
    "parallel",
    "components",
    "checkpoint.",
    "failures.",
)
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
        begins_anew: the folder holds a run, whatever its config, that finished no step; this one takes its place.

    Raises:
        InputError: the folder cannot be used, holds another run, this one and `resume` is "never", or one that is
            past the checkpoint or past the end of this one.
    """

    def __init__(self, config: RunConfig, output: str, resume: str):
        self.folder = Path(output)
        self.config, self.config_text = config, dump_config(config)
        self._check_place()
        if self.is_started_again:
            resume = "auto"
        self.resume = resume
        self.begins_anew = self._is_without_results() and not self._is_in_use()
        if self.config_file.is_file() and not self.begins_anew:
            self._check_run(resume)
        elif self.folder.is_dir() and any(self.folder.iterdir()) and not self.begins_anew:
            raise InputError(f"output={output}: the folder holds files that are not a run's: choose another")
        if config.length.steps is not None:
            self.check_length(config.length.steps)

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
        if resume == "never" and self._is_without_results():
            raise InputError(
                f"output={self.folder}: this run is at work there, in its first step: wait for it, or choose another; "
                "if it is not, remove the folder"
            )
        if resume == "never":
            raise InputError(
                f"output={self.folder}: the folder holds this run already: add --resume auto, or choose another"
            )
        if resume != "auto":
            self._check_past(Path(resume))

    def _check_past(self, checkpoint: Path) -> None:
        newer = [path for path in self.list_checkpoints() if step_of(path) > read_marker(checkpoint).step]
        if newer:
            raise InputError(
                f"--resume {checkpoint}: output={self.folder} holds {newer[-1].name}, which is past it: choose another "
                "output, or move the newer checkpoints away"
            )

    def check_length(self, total_steps: int) -> None:
        """Raises InputError where what this run goes on from is past its end, or finished and has no checkpoint.

        Args:
            total_steps: of the run.
        """
        if self.resume == "never":
            return
        goes_on = self.resume == "auto"
        if goes_on:
            step, place = self._step_reached, f"the run in output={self.folder}"
        else:
            step, place = read_marker(Path(self.resume)).step, f"--resume {self.resume}"
        if step > total_steps:
            steps, epochs = self.config.length.steps, self.config.length.epochs
            given = f"length.steps={steps}" if steps else f"length.epochs={epochs}, which are {total_steps} steps"
            raise InputError(
                f"{given}: {place} is at step {step} already: ask for more to go on, or choose another output"
            )
        if goes_on and self.final.exists() and not self.list_checkpoints() and not self.is_finished(total_steps):
            raise InputError(
                f"output={self.folder}: this run is finished and has no checkpoint to go on from: choose another folder"
            )

    def is_finished(self, total_steps: int) -> bool:
        """Whether the run of so many steps that is to go on is done, its model and report written.

        Args:
            total_steps: of the run.
        """
        return self.resume == "auto" and self.finished_after == self._step_reached == total_steps

    @property
    def finished_after(self) -> int | None:
        """Steps after which `final/` was written; None if it is not there, or nothing says of which step it is."""
        file = self.folder / FINISHED_FILE
        text = file.read_text() if file.is_file() and self.final.exists() else ""
        return int(text) if text.isdecimal() else None

    @property
    def _step_reached(self) -> int:
        return max([self.finished_after or 0, *map(step_of, self.list_checkpoints())])

    def note_finished(self, total_steps: int) -> None:
        """Keeps that the model and the report of the run are written.

        Args:
            total_steps: of the run.
        """
        with contextlib.suppress(OSError):  # then resuming writes them again
            write_complete(self.folder / FINISHED_FILE, str(total_steps))

    def _is_without_results(self) -> bool:
        """Whether a run was begun here and has nothing that took a whole step: a line of metrics, a checkpoint, even
        one that is damaged or not complete, or a model. What it says of its end (`flight/`, `not_finite/`), rollouts
        of a step that was not done and metrics of the untrained model may be replaced."""
        # A run makes checkpoints/ before anything else; a config.yaml alone is somebody's own.
        if not self.checkpoints.is_dir() or any(self.checkpoints.iterdir()) or self.final.exists():
            return False
        if not self.config_file.is_file():
            return {path.name for path in self.folder.iterdir()} <= FIRST_FILES
        return not any(record["step"] > 0 for record in read_metrics(self.metrics))

    def _is_in_use(self) -> bool:
        """Whether a run may be at work here, also where locks cannot tell."""
        try:
            with (self.folder / LOCK_FILE).open("r+") as file:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # all ranks look at once, and must see the same
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def create(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_complete(self.config_file, self.config_text)
            if AGENT_VARIABLE in os.environ:
                write_complete(self.folder / AGENT_FILE, os.environ[AGENT_VARIABLE])
        except OSError as error:
            raise InputError(f"output={self.folder}: cannot write there ({error.strerror}): choose another") from None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within this block others can tell that a run is at work here."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # of a file system that is full or has no locks
                file = stack.enter_context((self.folder / LOCK_FILE).open("w"))
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

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
        """The microbatches of a step at which training has diverged."""
        return self.folder / "not_finite"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def final(self) -> Path:
        return self.folder / "final"
