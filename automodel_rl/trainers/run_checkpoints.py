"""The checkpoints of a run: when one is due, which ones are kept, and which one a run goes on from."""

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

from automodel_rl.checkpoint.folder import CONFIG, HF_COPY, TEMPLATE, read_json
from automodel_rl.checkpoint.load import check_whole, load_checkpoint, newest_whole
from automodel_rl.checkpoint.saver import CheckpointSaver
from automodel_rl.config import RunConfig, completed, differing_keys
from automodel_rl.data.fingerprints import as_json, changes, inputs_of
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.launch.lifeline import LIFELINE_VARIABLE
from automodel_rl.observe.run_directory import RunDirectory, step_of
from automodel_rl.parallel.host_collectives import gather_objects

AUTO, NEVER = "auto", "never"
"""Values of `--resume` that are not the folder of a checkpoint."""

INPUTS = "inputs.json"
"""File of a checkpoint with the fingerprints of what the run reads."""

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class _Export:
    """A Hugging Face copy of a checkpoint that is being made.

    Attributes:
        folder: the checkpoint's folder.
        process: the process that makes the copy.
        our_end: this process's end of a pipe; the other process ends when it is closed.
    """

    folder: Path
    process: "subprocess.Popen[str]"
    our_end: int


class RunCheckpoints:
    """The checkpoints in a run directory. All ranks make it and call its methods together.

    Args:
        config: the run's config.
        directory: the run's files.
        engine: the engine that trains.
        higher_is_better: whether a larger metric makes a checkpoint better.

    Attributes:
        best: step and metric of the best checkpoint; None if there is none.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, engine: Engine, higher_is_better: bool):
        self.config, self.directory, self.engine = config.checkpoint, directory, engine
        self.trusts_code = config.model.trust_remote_code
        model = engine.handle.model
        self.needs_first_weights = config.needs_reference or model.lora is not None or bool(model.frozen)
        self.began_with = engine.handle.fingerprint() if dist.get_rank() == 0 else ""
        self.sign = 1 if higher_is_better else -1
        self.best: dict[str, float] | None = None
        self._best_to_be: dict[str, float] | None = None
        self.inputs = inputs_of(config, engine.handle.tokenizer_folder) if dist.get_rank() == 0 else {}
        texts = {CONFIG: directory.config_text, INPUTS: as_json(self.inputs)}
        if config.data.chat_template is not None:
            texts[TEMPLATE] = Path(config.data.chat_template).read_text()
        self.saver = CheckpointSaver(engine, texts, in_background=self.config.in_background)
        self.saved_at = time.monotonic()
        self._export: _Export | None = None

    @property
    def seconds(self) -> float:
        """Seconds that the last checkpoint took, until it was complete."""
        return self.saver.seconds

    def resume(self, resume: str, say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Restores a checkpoint. A collective.

        Args:
            resume: a checkpoint's folder, or "auto" for the run's newest whole checkpoint.
            say: prints a line about checkpoints that are passed over, or about configs that differ.

        Returns:
            The run's progress and this rank's state, as stored with the checkpoint; None if the run has no checkpoint.

        Raises:
            InputError: there are checkpoints, but none is whole; or the run reads other data than the checkpoint's.
        """
        folder = self._newest(say) if resume == AUTO else Path(resume)
        if folder is None:
            return None
        if resume != AUTO:
            check_whole(folder, self.engine.handle.layout.world_control)
            self._say_differences(folder, say)
        self._check_inputs(folder, is_own=resume == AUTO, say=say)
        progress, rank_state = load_checkpoint(self.engine, folder)
        self._check_first_weights(progress.get("began_with"), folder)
        self.best = self._best_to_be = self._best_of(progress["best"], say)
        if resume == AUTO and dist.get_rank() == 0 and self.config.format == "both" and not (folder / HF_COPY).exists():
            self._export = self._begin_export(folder)
        return progress, rank_state

    def _check_inputs(self, folder: Path, is_own: bool, say: Callable[[str], None]) -> None:
        """Says what has changed of what the run reads. Raises InputError on all ranks if the run cannot go on with it.

        Args:
            folder: the checkpoint's folder.
            is_own: whether it is of this run. A run that goes on from another one's may read anything.
            say: prints a line.
        """
        refusal = ""
        if dist.get_rank() == 0 and (folder / INPUTS).is_file():
            for change in changes(read_json(folder / INPUTS), self.inputs):
                if is_own and change.before.follows and not self.config.accept_changed_inputs:
                    refusal = refusal or (
                        f"{change}: it has changed since {folder}, and {change.before.follows}: put it back; begin a "
                        "new run from the checkpoint's weights (automodel-rl export); or go on nevertheless with "
                        "--checkpoint.accept_changed_inputs true"
                    )
                else:
                    say(f"changed since {folder}: {change}")
        refusal = gather_objects(refusal, self.engine.handle.layout.world_control)[0]
        if refusal:
            raise InputError(refusal)

    def _best_of(self, best: dict[str, float] | None, say: Callable[[str], None]) -> dict[str, float] | None:
        """The best checkpoint of a run to go on with, unless it is not there, as where it is another run's."""
        if best is None:
            return None
        if gather_objects(self._folder(best["step"]).exists(), self.engine.handle.layout.world_control)[0]:
            return best
        say(
            f"the best checkpoint so far, of step {best['step']:.0f}, is not in this run: later ones are not compared "
            "with it"
        )
        return None

    def _folder(self, step: float) -> Path:
        return self.directory.checkpoints / f"step_{step:.0f}"

    def _check_first_weights(self, there: str | None, folder: Path) -> None:
        """Raises InputError on all ranks if the run needs the weights that it began with, and they have changed."""
        has_changed = there not in (None, self.began_with) and self.needs_first_weights
        if gather_objects(has_changed, self.engine.handle.layout.world_control)[0]:
            raise InputError(
                f"model.path={self.engine.handle.source}: its weights or adapters are not those with which {folder} "
                "began, and the run needs these as its reference or as frozen weights: put them back, or begin anew"
            )

    def load_best(self, step: int) -> dict[str, float] | None:
        """Restores the best checkpoint, if it is not that of the last step. A collective.

        Args:
            step: the last step.

        Returns:
            Its step and metric; None if nothing was restored.
        """
        best = gather_objects(self.best, self.engine.handle.layout.world_control)[0]
        if best is None or best["step"] == step:
            return None
        load_checkpoint(self.engine, self._folder(best["step"]))
        return best

    def _newest(self, say: Callable[[str], None]) -> Path | None:
        world = self.engine.handle.layout.world_control
        folders = None
        if dist.get_rank() == 0:  # other ranks may see an old state of a shared folder
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
        """Whether `checkpoint.every_minutes` have passed since the last checkpoint, by this rank's clock."""
        minutes = self.config.every_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def save(self, step: int, state: dict[str, Any], metric: float | None) -> str | None:
        """Writes a checkpoint, or begins to write it in the background. First waits for the one before. A collective.

        Args:
            step: number of steps that are done.
            state: this rank's state, JSON.
            metric: this step's metric for choosing the best checkpoint; None if it was not measured.

        Returns:
            Why this checkpoint or the one before could not be written; None if nothing failed.
        """
        before = self._settle(self.saver.wait())
        if dist.get_rank() == 0:
            self.directory.remove_leftovers()  # they take up room that this checkpoint needs
        best = self.best
        if metric is not None and self._is_better(metric, self.best):
            best = {"step": step, "metric": metric}
        self._best_to_be = best
        folder = self._folder(step)
        error = self.saver.save(
            folder, {"step": step, "best": best, "began_with": self.began_with}, state, self._keep_chosen(step, best)
        )
        self.saved_at = time.monotonic()
        if not self.config.in_background:
            error = self._settle(error)
        return before or error

    def is_best(self, metric: float | None) -> bool:
        """Whether a step with this metric must be kept as the best so far, by the checkpoints that this rank knows of;
        the one that is being written counts."""
        saves = self.config.every_steps is not None or self.config.every_minutes is not None
        return self.config.keep_best and saves and metric is not None and self._is_better(metric, self._best_to_be)

    def _is_better(self, metric: float, best: dict[str, float] | None) -> bool:
        return math.isfinite(metric) and (best is None or self.sign * metric > self.sign * best["metric"])

    def poll(self) -> str | None:
        """Why the last checkpoint could not be written; None if it could, or if that is not known yet."""
        return self._settle(self.saver.wait()) if self.saver.is_done else None

    def finish(self) -> str | None:
        """Waits for checkpoints that are being written. A collective.

        Returns:
            Why the last checkpoint could not be written; None if it could.
        """
        error = self._settle(self.saver.wait())
        if dist.get_rank() == 0:
            self.saver.warning = self._end_export() or self.saver.warning
        dist.barrier(self.saver.group)  # a rank that leaves early would end the job for the others
        return error

    def warning(self) -> str | None:
        """A warning about something else that went wrong. Rank 0 gets it once; other ranks get None."""
        warning, self.saver.warning = self.saver.warning, None
        return warning

    def _settle(self, error: str | None) -> str | None:
        """Notes which checkpoint is the best, once the last one is written or has failed. Returns the error."""
        if error is None:
            self.best = self._best_to_be
        self._best_to_be = self.best
        return error

    def _keep_chosen(self, step: int, best: dict[str, float] | None) -> Callable[[Path], str | None]:
        """A function that rank 0 calls after a step's checkpoint is complete. It removes those that are not kept."""

        def then(folder: Path) -> str | None:
            warning = self._end_export()
            done = [path for path in self.directory.list_checkpoints() if step_of(path) <= step]
            keep = set(done[-self.config.keep_last :])
            if self.config.keep_best and best is not None:
                keep.add(self._folder(best["step"]))
            try:
                self.directory.remove_checkpoints([path for path in done if path not in keep])
            except OSError as error:
                warning = f"older checkpoints could not be removed ({error.strerror})"
            if self.config.format == "both":
                self._export = self._begin_export(folder)
            return warning

        return then

    def _begin_export(self, folder: Path) -> _Export:
        """Begins to make the Hugging Face copy, in a process that is no rank, uses no device and ends with us."""
        their_end, our_end = os.pipe()
        outside = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
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
            Why it could not be made; None if it could.
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

    def _say_differences(self, folder: Path, say: Callable[[str], None]) -> None:
        with contextlib.suppress(OSError, yaml.YAMLError):
            there = completed(yaml.safe_load((folder / CONFIG).read_text()), self.directory.config)
            keys = differing_keys(there, yaml.safe_load(self.directory.config_text))
            if keys:
                say(f"going on from {folder}, of a run that differs in {', '.join(keys[:8])}")
