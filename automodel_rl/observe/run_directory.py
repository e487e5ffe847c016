"""The run directory: which run it holds, its files, and the versions it ran with."""

import contextlib
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from automodel_rl.checkpoint.folder import is_complete, read_marker
from automodel_rl.config import RunConfig, completed, differing_keys, dump_config
from automodel_rl.config.strict_yaml import parse_yaml, read_yaml
from automodel_rl.errors import InputError
from automodel_rl.files import check_writable, write_atomic
from automodel_rl.observe.metrics import read_lines
from automodel_rl.observe.run_files import RunFiles, read_number, step_of
from automodel_rl.observe.run_lock import JOB_VARIABLE, RunLock, check_free

PACKAGES = ("automodel-rl", "torch", "transformers", "nemo-automodel", "datasets", "triton", "transformer-engine")


def versions() -> dict[str, Any]:
    import torch  # slow, and the command line checks run directories before it needs torch

    devices = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return {
        **{name: found for name in PACKAGES if (found := _version(name)) is not None},
        "python": platform.python_version(),
        "CUDA": torch.version.cuda,
        "device": devices,
        "ranks": int(os.environ.get("WORLD_SIZE", 1)),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


AGENT_VARIABLE, AGENT_FILE = "TORCHELASTIC_RUN_ID", ".started_by"
"""Environment variable with torchrun's job id, and the file in which a run stores it."""

FIRST_FILES = {"checkpoints", ".in_use", ".config.yaml.unfinished"}
"""Files that a run creates before its config.yaml is complete."""

NO_NAME = "none"
"""torchrun's default job id."""

EXIT_WAIT_SECONDS = 20.0
"""Longest time in seconds until ranks that torchrun has killed are gone."""

MAY_DIFFER = (
    *("length.", "output", "observe.", "checkpoint.", "failures.", "launch"),
    *("parallel", "components", "memory.", "batch.microbatch_tokens", "data.validation", "data.num_workers"),
    *("optimizer.lr", "optimizer.warmup_", "optimizer.decay", "optimizer.min_lr_ratio", "optimizer.weight_decay"),
    *("optimizer.groups", "optimizer.max_grad_norm", "optimizer.max_skipped_steps", "model.attention"),
    *("rollout.generator", "rollout.retries", "rollout.warn_logprob_error", "rollout.validation_", "weight_sync."),
)
"""Prefixes of the config keys that a resumed run may change: length, folder, monitoring and checkpoints, layout and
memory, learning-rate schedule, validation, and generators."""


def _value(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    text = str(values)
    return text if len(text) < 60 else f"{text[:57]}..."


class RunDirectory(RunFiles):
    """The files of one run.

    Args:
        output: the run's folder.
        resume: "auto" to continue the run in the folder, "never", or the folder of a checkpoint to continue from.

    Attributes:
        resume: as given, but "auto" if torchrun has restarted this run.
        changes: config changes from the run that it resumes, as texts.
        replaces_empty_run: whether the folder holds a run without a finished step, of any config, which this run
            replaces.

    Raises:
        InputError: the folder cannot be used or is in use; or it holds another run, or this run while `resume` is
            "never", or a run that is already past the given checkpoint or past the end of this run.
    """

    def __init__(self, config: RunConfig, output: str, resume: str):
        super().__init__(Path(output))
        self.config, self.config_text = config, dump_config(config)
        self._lock: RunLock | None = None
        self._check_place()
        self._check_free()
        if self.is_started_again:
            resume = "auto"
        self.resume = resume
        self.changes: list[str] = []
        self.replaces_empty_run = self._is_without_results()
        if self.config_file.is_file() and not self.replaces_empty_run:
            self._check_run(resume)
        elif self.folder.is_dir() and any(self.folder.iterdir()) and not self.replaces_empty_run:
            raise InputError(f"output={output}: the folder holds files that do not belong to a run: choose another")
        if config.length.steps is not None:
            self.check_length(config.length.steps)

    def _check_place(self) -> None:
        check_writable(self.folder, f"output={self.folder}")

    def _check_free(self) -> None:
        deadline = time.monotonic() + (EXIT_WAIT_SECONDS if self.is_started_again else 0)
        while True:
            try:
                return check_free(self.lock_file, self._job)
            except InputError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    @property
    def _job(self) -> str:
        """Name of this process's job, which persists over restarts; empty if it has none."""
        agent = os.environ.get(AGENT_VARIABLE, "")
        return os.environ.get(JOB_VARIABLE, "" if agent == NO_NAME else agent)

    def lock(self) -> None:
        """Locks the folder against other runs until `unlock` or the end of the process.

        Raises:
            InputError: another run is using it.
        """
        if self._lock is None and self.folder.is_dir():
            with contextlib.suppress(OSError):  # the disk may be full
                self._lock = RunLock(self.lock_file, self._job)

    def check_own(self) -> None:
        if self._lock is not None:
            self._lock.check_own()

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _check_run(self, resume: str) -> None:
        there = completed(read_yaml(self.config_file), self.config)
        given = parse_yaml(self.config_text)
        other = [key for key in differing_keys(there, given) if not key.startswith(MAY_DIFFER)]
        if other:
            raise InputError(
                f"output={self.folder}: the folder holds another run (it differs in {', '.join(other[:5])}): choose "
                f"another folder, or resume it with {self.config_file}; to continue from it with other values, pass "
                "--resume CHECKPOINT --output NEW"
            )
        changed = [key for key in differing_keys(there, given) if key.startswith(MAY_DIFFER) and key != "output"]
        self.changes = [f"{key} {_value(there, key)} -> {_value(given, key)}" for key in changed]
        if resume == "never":
            raise InputError(
                f"output={self.folder}: the folder already holds this run: add --resume auto, or choose another"
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
        """Raises InputError if this run cannot resume: it would start past `total_steps`, or it finished without a
        checkpoint."""
        if self.resume == "never":
            return
        goes_on = self.resume == "auto"
        if goes_on:
            step, place = self._step_reached, f"the run in output={self.folder}"
        else:
            step, place = read_marker(Path(self.resume)).step, f"--resume {self.resume}"
        if step > total_steps:
            steps, epochs = self.config.length.steps, self.config.length.epochs
            given = f"length.steps={steps}" if steps else f"length.epochs={epochs}, which is {total_steps} steps"
            raise InputError(
                f"{given}: {place} is already at step {step}: raise it to resume, or choose another output"
            )
        if goes_on and self.final.exists() and not self.list_checkpoints() and not self.is_finished(total_steps):
            raise InputError(
                f"output={self.folder}: this run is finished and has no checkpoint to resume from: choose another "
                "folder"
            )

    def is_finished(self, total_steps: int) -> bool:
        """Whether the run to resume is already finished: all `total_steps` done, model and report written."""
        return self.resume == "auto" and self.finished_after == self._step_reached == total_steps

    @property
    def _step_reached(self) -> int:
        return max([self.finished_after or 0, *map(step_of, self.list_checkpoints())])

    def note_finished(self, total_steps: int) -> None:
        """Records in the folder that the run's model and report have been written."""
        with contextlib.suppress(OSError):  # without this file, resuming writes model and report again
            write_atomic(self.finished_file, str(total_steps))

    def _is_without_results(self) -> bool:
        """Whether a run started here but finished no step: it has no metrics of a step, no model, and no checkpoint,
        not even a damaged or incomplete one. All other files may be replaced: `flight/`, `not_finite/`, rollouts of
        an unfinished step, and metrics of the untrained model."""
        # A run creates checkpoints/ first, so a config.yaml alone was put there by a user.
        if not self.checkpoints.is_dir() or any(self.checkpoints.iterdir()) or self.final.exists():
            return False
        if not self.config_file.is_file():
            return {path.name for path in self.folder.iterdir()} <= FIRST_FILES
        return not any(record["step"] > 0 for record in read_lines(self.metrics))

    @property
    def planned_steps(self) -> int | None:
        """Total number of steps at the run's last start; None if it has never started."""
        return read_number(self.total_steps_file)

    def create(self, total_steps: int) -> None:
        """Creates and locks the folder, and writes the config, the total steps and the versions.

        Raises:
            InputError: the folder cannot be written, or another run is using it.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.lock()
            write_atomic(self.config_file, self.config_text)
            write_atomic(self.total_steps_file, str(total_steps))
            write_atomic(self.versions, json.dumps(versions(), indent=2))
            self.failure.unlink(missing_ok=True)
            if AGENT_VARIABLE in os.environ:
                write_atomic(self.folder / AGENT_FILE, os.environ[AGENT_VARIABLE])
        except OSError as error:
            raise InputError(f"output={self.folder}: cannot write there ({error.strerror}): choose another") from None

    @property
    def is_started_again(self) -> bool:
        """Whether torchrun is restarting the run in this folder."""
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            return True
        agent, file = os.environ.get(AGENT_VARIABLE, ""), self.folder / AGENT_FILE
        return agent not in ("", NO_NAME) and file.is_file() and file.read_text() == agent

    def remove_checkpoints(self, folders: Sequence[Path]) -> None:
        for path in folders:
            path.rename(
                path.with_name(f".{path.name}.removed")
            )  # renamed first: a half-deleted folder must not look complete
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Removes unfinished folders left by killed runs. Must not be called while a checkpoint is being written."""
        for path in self._hidden(""):
            shutil.rmtree(path, ignore_errors=True)

    def recover_checkpoints(self) -> None:
        """Renames complete checkpoints that a killed run had not yet renamed."""
        for ending in ("unfinished", "old"):
            for path in self._hidden(f".{ending}"):
                named = path.with_name(path.name.removeprefix(".").removesuffix(f".{ending}"))
                if is_complete(path) and not named.exists():
                    with contextlib.suppress(OSError):
                        path.rename(named)

    def _hidden(self, ending: str) -> Iterator[Path]:
        """Yields checkpoint folders without their final names, including those of further models."""
        for where in ("", "*/"):
            yield from self.checkpoints.glob(f"{where}.step_*{ending}")

    def set_aside(self, newer_than: Path) -> None:
        """Renames damaged checkpoints newer than the one the run resumes from."""
        for path in self.list_checkpoints():
            if step_of(path) > step_of(newer_than):  # otherwise they would count as newer than future checkpoints
                with contextlib.suppress(OSError):
                    path.rename(path.with_name(f"{path.name}.damaged"))

    def take_nccl_traces(self) -> None:
        """Makes NCCL's flight recorder write here when a collective times out. Call it before NCCL is used."""
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(self.flights / "nccl_trace_rank_"))
