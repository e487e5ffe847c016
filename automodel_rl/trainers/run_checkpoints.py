"""The checkpoints of a run: when one is due, which are kept, and from which a run goes on."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from automodel_rl.checkpoint.folder import CONFIG, HF_COPY
from automodel_rl.checkpoint.load import check_whole, load_checkpoint, newest_whole
from automodel_rl.checkpoint.saver import CheckpointSaver
from automodel_rl.config import RunConfig, differing_keys
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.observe.run_directory import RunDirectory, step_of

AUTO, NEVER = "auto", "never"
"""What `--resume` may say in place of a checkpoint's folder."""


class RunCheckpoints:
    """Checkpoints in a run directory. All ranks make and call it together.

    Args:
        config: of the run.
        directory: its files.
        engine: what is trained.
        higher_is_better: of the metric by which the best checkpoint is told.

    Attributes:
        best: step and metric of the best checkpoint so far.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, engine: Engine, higher_is_better: bool):
        self.config, self.directory, self.engine = config.checkpoint, directory, engine
        self.sign = 1 if higher_is_better else -1
        self.best: dict[str, float] | None = None
        self.saver = CheckpointSaver(engine, directory.config_text, in_background=self.config.in_background)
        self.saved_at = time.monotonic()
        self.seconds = 0.0
        self._exporter: tuple[Path, subprocess.Popen[str]] | None = None

    def resume(self, resume: str, say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Restores a checkpoint. A collective.

        Args:
            resume: a checkpoint's folder, or "auto" for the newest one of the run that is whole.
            say: told of what is passed over, and of what differs.

        Returns:
            What was stored with it: the trainer's place and this rank's state; None if the run has no checkpoint.

        Raises:
            InputError: there are checkpoints, and none is whole.
        """
        world = self.engine.handle.layout.world_control
        if resume != AUTO:
            folder = Path(resume)
            check_whole(folder, world)
            self._tell_differences(folder, say)
        else:
            folders = self.directory.list_checkpoints()
            if not folders:
                return None
            whole = newest_whole(folders, world, say)
            if whole is None:
                raise InputError(
                    f"output={self.directory.folder}: none of its {len(folders)} checkpoints is whole: give the folder "
                    "of another one in --resume, or choose another output to begin anew"
                )
            folder = whole
            if dist.get_rank() == 0:
                self.directory.set_aside(newer_than=folder)
        progress, rank_state = load_checkpoint(self.engine, folder)
        self.best = progress["best"]
        return progress, rank_state

    def is_due(self, step: int) -> bool:
        """Whether so many minutes have passed, by this rank's clock, since the last one."""
        minutes = self.config.every_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def save(self, step: int, state: dict[str, Any], metric: float | None) -> str | None:
        """Writes a checkpoint, or begins to. A collective.

        Args:
            step: that it is taken after.
            state: of this rank; JSON.
            metric: of this step, by which the best checkpoint is told; None if it was not measured.

        Returns:
            Why a checkpoint could not be written: this one, or one before.
        """
        if metric is not None and (self.best is None or self.sign * metric > self.sign * self.best["metric"]):
            self.best = {"step": step, "metric": metric}
        started = time.monotonic()
        folder = self.directory.checkpoints / f"step_{step}"
        error = self.saver.save(folder, {"step": step, "best": self.best}, state, self._keep_chosen(step))
        self.saved_at = time.monotonic()
        self.seconds = self.saved_at - started
        return error

    def poll(self) -> str | None:
        """Why the last checkpoint could not be written, if that is known by now."""
        return self.saver.wait() if self.saver.is_done else None

    def finish(self) -> str | None:
        """Waits for what is being written.

        Returns:
            Why it could not be.
        """
        error = self.saver.wait()
        return error or self._end_export()

    def _keep_chosen(self, step: int) -> Callable[[Path], None]:
        """What rank 0 does when the checkpoint of a step is complete."""
        best = self.best

        def then(folder: Path) -> None:
            error = self._end_export()
            whole = [path for path in self.directory.list_checkpoints() if step_of(path) <= step]
            keep = set(whole[-self.config.keep_last :])
            if self.config.keep_best and best is not None:
                keep.add(self.directory.checkpoints / f"step_{best['step']:.0f}")
            self.directory.remove_checkpoints([path for path in whole if path not in keep])
            if self.config.format == "both":
                self._exporter = folder, _export(folder)
            if error is not None:
                raise OSError(error)

        return then

    def _end_export(self) -> str | None:
        """Waits for the Hugging Face copy that is being made.

        Returns:
            Why it could not be.
        """
        if self._exporter is None:
            return None
        folder, process = self._exporter
        _, errors = process.communicate()
        self._exporter = None
        if process.returncode == 0:
            return None
        return f"{folder / HF_COPY}: {(errors.strip().splitlines() or ['the export ended without a word'])[-1]}"

    def _tell_differences(self, folder: Path, say: Callable[[str], None]) -> None:
        with contextlib.suppress(OSError, yaml.YAMLError):
            there = yaml.safe_load((folder / CONFIG).read_text())
            keys = differing_keys(there, yaml.safe_load(self.directory.config_text))
            if keys:
                say(f"going on from {folder}, of a run that differs in {', '.join(keys[:8])}")


def _export(folder: Path) -> "subprocess.Popen[str]":
    """Begins to make the Hugging Face copy, in a process that is no rank and leaves devices alone."""
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return subprocess.Popen(
        [sys.executable, "-m", "automodel_rl", "export", str(folder), str(folder / HF_COPY)],
        env={**outside, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
