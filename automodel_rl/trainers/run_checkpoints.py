"""The checkpoints of a run: when one is due, which are kept, and from which a run goes on."""

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from automodel_rl.checkpoint.folder import CONFIG, HF_COPY, TEMPLATE
from automodel_rl.checkpoint.load import check_whole, load_checkpoint, newest_whole
from automodel_rl.checkpoint.saver import CheckpointSaver
from automodel_rl.config import RunConfig, differing_keys
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.launch.lifeline import LIFELINE_VARIABLE
from automodel_rl.observe.run_directory import RunDirectory, step_of
from automodel_rl.parallel.host_collectives import gather_objects

AUTO, NEVER = "auto", "never"
"""What `--resume` may say in place of a checkpoint's folder."""

OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class _Export:
    """A Hugging Face copy that is being made.

    Attributes:
        folder: of the checkpoint.
        process: that makes it.
        our_end: of the pipe that ends it with us.
    """

    folder: Path
    process: "subprocess.Popen[str]"
    our_end: int


class RunCheckpoints:
    """Checkpoints in a run directory. All ranks make and call it together.

    Args:
        config: of the run.
        directory: its files.
        engine: what is trained.
        higher_is_better: of the metric by which the best checkpoint is told.

    Attributes:
        best: step and metric of the best checkpoint that there is.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, engine: Engine, higher_is_better: bool):
        self.config, self.directory, self.engine = config.checkpoint, directory, engine
        self.trusts_code = config.model.trust_remote_code
        self.sign = 1 if higher_is_better else -1
        self.best: dict[str, float] | None = None
        self._best_to_be: dict[str, float] | None = None
        texts = {CONFIG: directory.config_text}
        if config.data.chat_template is not None:
            texts[TEMPLATE] = Path(config.data.chat_template).read_text()
        self.saver = CheckpointSaver(engine, texts, in_background=self.config.in_background)
        self.saved_at = time.monotonic()
        self._export: _Export | None = None

    @property
    def seconds(self) -> float:
        """That the last checkpoint took."""
        return self.saver.seconds

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
        folder = self._newest(say) if resume == AUTO else Path(resume)
        if folder is None:
            return None
        if resume != AUTO:
            check_whole(folder, self.engine.handle.layout.world_control)
            self._tell_differences(folder, say)
        progress, rank_state = load_checkpoint(self.engine, folder)
        self.best = self._best_to_be = progress["best"]
        if resume == AUTO and dist.get_rank() == 0 and self.config.format == "both" and not (folder / HF_COPY).exists():
            self._export = self._begin_export(folder)
        return progress, rank_state

    def _newest(self, say: Callable[[str], None]) -> Path | None:
        world = self.engine.handle.layout.world_control
        folders = None
        if dist.get_rank() == 0:  # what the others see of a shared folder may be old
            self.directory.recover_checkpoints()
            folders = self.directory.list_checkpoints()
        folders = gather_objects(folders, world)[0]
        if not folders:
            return None
        newest = newest_whole(folders, world, say)
        if newest is None:
            raise InputError(
                f"output={self.directory.folder}: none of its {len(folders)} checkpoints is whole: give the folder of "
                "another one in --resume, or choose another output to begin anew"
            )
        if dist.get_rank() == 0:
            self.directory.set_aside(newer_than=newest)
        return newest

    def is_due(self) -> bool:
        """Whether so many minutes have passed, by this rank's clock, since the last one."""
        minutes = self.config.every_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def save(self, step: int, state: dict[str, Any], metric: float | None) -> str | None:
        """Writes a checkpoint, or begins to, when the one before is done. A collective.

        Args:
            step: that it is taken after.
            state: of this rank; JSON.
            metric: of this step, by which the best checkpoint is told; None if it was not measured.

        Returns:
            Why a checkpoint could not be written: this one, or one before.
        """
        before = self._settle(self.saver.wait())
        if dist.get_rank() == 0:
            self.directory.remove_leftovers()  # they would take the room of this one
        best = self.best
        if metric is not None and math.isfinite(metric) and self._is_better(metric):
            best = {"step": step, "metric": metric}
        self._best_to_be = best
        folder = self.directory.checkpoints / f"step_{step}"
        error = self.saver.save(folder, {"step": step, "best": best}, state, self._keep_chosen(step, best))
        self.saved_at = time.monotonic()
        if not self.config.in_background:
            error = self._settle(error)
        return before or error

    def _is_better(self, metric: float) -> bool:
        return self.best is None or self.sign * metric > self.sign * self.best["metric"]

    def poll(self) -> str | None:
        """Why the last checkpoint could not be written, if that is known by now."""
        return self._settle(self.saver.wait()) if self.saver.is_done else None

    def finish(self) -> str | None:
        """Waits for what is being written. A collective.

        Returns:
            Why the last checkpoint could not be.
        """
        error = self._settle(self.saver.wait())
        if dist.get_rank() == 0:
            self.saver.warning = self._end_export() or self.saver.warning
        dist.barrier(self.saver.group)  # who leaves before another is done ends the job
        return error

    def warning(self) -> str | None:
        """What else went wrong, once, on rank 0."""
        warning, self.saver.warning = self.saver.warning, None
        return warning

    def _settle(self, error: str | None) -> str | None:
        """Notes which checkpoint is the best, now that it is known what became of the last one."""
        if error is None:
            self.best = self._best_to_be
        return error

    def _keep_chosen(self, step: int, best: dict[str, float] | None) -> Callable[[Path], str | None]:
        """What rank 0 does when the checkpoint of a step is complete."""

        def then(folder: Path) -> str | None:
            warning = self._end_export()
            done = [path for path in self.directory.list_checkpoints() if step_of(path) <= step]
            keep = set(done[-self.config.keep_last :])
            if self.config.keep_best and best is not None:
                keep.add(self.directory.checkpoints / f"step_{best['step']:.0f}")
            try:
                self.directory.remove_checkpoints([path for path in done if path not in keep])
            except OSError as error:
                warning = f"older checkpoints could not be removed ({error.strerror})"
            if self.config.format == "both":
                self._export = self._begin_export(folder)
            return warning

        return then

    def _begin_export(self, folder: Path) -> _Export:
        """Begins to make the Hugging Face copy, in a process that is no rank, leaves devices alone and ends with us."""
        their_end, our_end = os.pipe()
        outside = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
        trust = ["--model.trust_remote_code", "true"] if self.trusts_code else []
        process = subprocess.Popen(
            [sys.executable, "-m", "automodel_rl", "export", str(folder), str(folder / HF_COPY), *trust],
            env={**outside, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", LIFELINE_VARIABLE: str(their_end)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[their_end],
        )
        os.close(their_end)
        return _Export(folder, process, our_end)

    def _end_export(self) -> str | None:
        """Waits for the Hugging Face copy that is being made.

        Returns:
            Why it could not be.
        """
        if self._export is None:
            return None
        export, self._export = self._export, None
        _, errors = export.process.communicate()
        os.close(export.our_end)
        if export.process.returncode == 0:
            return None
        said = (errors.strip().splitlines() or ["it ended without a word"])[-1]
        return f"{export.folder / HF_COPY} could not be made ({said})"

    def _tell_differences(self, folder: Path, say: Callable[[str], None]) -> None:
        with contextlib.suppress(OSError, yaml.YAMLError):
            there = yaml.safe_load((folder / CONFIG).read_text())
            keys = differing_keys(there, yaml.safe_load(self.directory.config_text))
            if keys:
                say(f"going on from {folder}, of a run that differs in {', '.join(keys[:8])}")
