"""A run's checkpoints: when one is due, which are kept, and which one a run resumes from."""

import contextlib
import functools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automodel_rl.checkpoint.folder import CONFIG, HF_COPY, TEMPLATE, read_json
from automodel_rl.config import RunConfig, completed, differing_keys
from automodel_rl.config.strict_yaml import parse_yaml, read_yaml
from automodel_rl.data.fingerprints import as_json, changes, inputs_of
from automodel_rl.errors import InputError
from automodel_rl.launch.lifeline import LIFELINE_VARIABLE
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.observe.run_files import step_of
from automodel_rl.policy.policy import Policy
from automodel_rl.policy.policy_rank import CheckpointStatus
from automodel_rl.trainers.further_checkpoints import FurtherCheckpoints

AUTO, NEVER = "auto", "never"
"""Values of `--resume` other than a checkpoint's folder."""

INPUTS = "inputs.json"
"""A checkpoint's file with fingerprints of the run's inputs."""

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class _Export:
    """A Hugging Face copy of a checkpoint in the making.

    Attributes:
        folder: the checkpoint's folder.
        our_end: this process's end of a pipe; closing it ends the exporting process.
    """

    folder: Path
    process: "subprocess.Popen[str]"
    our_end: int


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint that is being written.

    Attributes:
        best: step and metric of the best checkpoint once this one is complete.
    """

    folder: Path
    best: dict[str, float] | None


class RunCheckpoints:
    """The checkpoints in a run directory.

    Args:
        handle: the model, before a checkpoint is loaded.
        further: the models trained beside it, by name.

    Attributes:
        best: step and metric of the best checkpoint; None if there is none.
        seconds: time the last checkpoint took until it was complete.
        unmeasured_step: step whose metric is still unknown and whose checkpoint may become the best; None if there is
            none.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        policy: Policy,
        handle: ModelHandle,
        further: Mapping[str, Policy],
        higher_is_better: bool,
    ):
        self.config, self.directory, self.source = config.checkpoint, directory, handle.source
        self._ask = functools.partial(policy.crew.ask, policy.name)
        self.trusts_code = config.model.trust_remote_code
        model = handle.model
        self.needs_initial_weights = config.needs_reference or model.lora is not None or bool(model.frozen)
        self.initial_fingerprint = handle.fingerprint()
        self.sign = 1 if higher_is_better else -1
        self.best: dict[str, float] | None = None
        self.unmeasured_step: int | None = None
        self._selection_lock = threading.Lock()  # guards the choice of checkpoints to keep
        self.inputs = inputs_of(config, handle.tokenizer_folder)
        texts = {CONFIG: directory.config_text, INPUTS: as_json(self.inputs)}
        if config.data.chat_template is not None:
            texts[TEMPLATE] = Path(config.data.chat_template).read_text()
        self._ask("open_saver", texts, self.config.in_background)
        self.further = FurtherCheckpoints(policy, further, directory.checkpoints, {CONFIG: directory.config_text})
        self.seconds = 0.0
        self.saved_at = time.monotonic()
        self._in_flight: _Checkpoint | None = None
        self._export: _Export | None = None
        self._warning: str | None = None
        self._cleanup_thread: threading.Thread | None = None

    def resume(self, resume: str, say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Restores a checkpoint.

        Args:
            resume: a checkpoint's folder, or "auto" for the run's newest complete checkpoint.
            say: prints a line about skipped checkpoints or config differences.

        Returns:
            The run's progress and the program's state, as stored; None if the run has no checkpoint.

        Raises:
            InputError: no checkpoint is complete, or the run's inputs differ from the checkpoint's.
        """
        folder = self._newest(say) if resume == AUTO else Path(resume)
        if folder is None:
            return None
        if resume != AUTO:
            self._ask("check_checkpoint", folder)
            self._say_differences(folder, say)
        self._check_inputs(folder, is_own=resume == AUTO, say=say)
        self.further.load(folder)
        progress, state = self._ask("load_checkpoint", folder)
        self._check_initial_weights(progress.get("began_with"), folder)
        self.best = self._best_of(progress["best"], say)
        if resume == AUTO and self.config.format == "both" and not (folder / HF_COPY).exists():
            self._export = self._begin_export(folder)
        return progress, state

    def _check_inputs(self, folder: Path, is_own: bool, say: Callable[[str], None]) -> None:
        """Reports changed inputs of the run. Raises InputError if it cannot continue with them.

        Args:
            is_own: whether the checkpoint is this run's. A run that starts from another run's checkpoint may have
                any inputs.
        """
        if not (folder / INPUTS).is_file():
            return
        for change in changes(read_json(folder / INPUTS), self.inputs):
            if is_own and change.before.follows and not self.config.accept_changed_inputs:
                raise InputError(
                    f"{change}: it has changed since {folder}, and {change.before.follows}: restore it; start a new "
                    "run from the checkpoint's weights (automodel-rl export); or continue anyway with "
                    "--checkpoint.accept_changed_inputs true"
                )
            say(f"changed since {folder}: {change}")

    def _best_of(self, best: dict[str, float] | None, say: Callable[[str], None]) -> dict[str, float] | None:
        """Returns the stored best checkpoint, unless it does not exist in this run's folder."""
        if best is None:
            return None
        if self._folder(best["step"]).exists():
            return best
        say(
            f"the best checkpoint so far, of step {best['step']:.0f}, is not in this run: later ones are not compared "
            "with it"
        )
        return None

    def _folder(self, step: float) -> Path:
        return self.directory.checkpoints / f"step_{step:.0f}"

    def _check_initial_weights(self, there: str | None, folder: Path) -> None:
        """Raises InputError if the run needs its initial weights, and they have changed."""
        if there not in (None, self.initial_fingerprint) and self.needs_initial_weights:
            raise InputError(
                f"model.path={self.source}: its weights or adapters differ from those that {folder} started from, and "
                "the run needs these as its reference or as frozen weights: restore them, or start a new run"
            )

    def load_best(self, step: int) -> dict[str, float] | None:
        """Restores the best checkpoint, unless it is that of the last step, `step`. Returns its step and metric, or
        None."""
        if self.best is None or self.best["step"] == step:
            return None
        self._ask("load_checkpoint", self._folder(self.best["step"]))
        return self.best

    def _newest(self, say: Callable[[str], None]) -> Path | None:
        self.directory.recover_checkpoints()
        folders = self.directory.list_checkpoints()
        if not folders:
            return None
        older = folders
        while True:
            newest, warnings = self._ask("newest_checkpoint", older)
            for warning in warnings:
                say(warning)
            if newest is None:
                raise InputError(
                    f"output={self.directory.folder}: none of its {len(folders)} checkpoints is complete: pass another "
                    "checkpoint to --resume, or choose another output to restart"
                )
            problem = self.further.problem_of(newest)
            if not problem:
                break
            say(f"warning: {problem}, so {newest} is unusable; falling back to the previous one")
            older = [folder for folder in older if step_of(folder) < step_of(newest)]
        self.directory.set_aside(newer_than=newest)
        return Path(newest)

    def is_due(self) -> bool:
        """Whether `checkpoint.every_minutes` have passed since the last checkpoint."""
        minutes = self.config.every_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def save(self, step: int, state: dict[str, Any], metric: float | None) -> str | None:
        """Writes a checkpoint, possibly in the background, after waiting for the previous one.

        Args:
            step: number of completed steps.
            state: the program's state, JSON values.
            metric: this step's metric for choosing the best checkpoint; None if it was not measured.

        Returns:
            The error of this checkpoint or the previous one, or None.
        """
        before = self._settle(waits=True)
        self._join()
        self.directory.remove_leftovers()  # this checkpoint needs their space
        best = self.best
        if metric is not None and self._is_better(metric, self.best):
            best = {"step": step, "metric": metric}
        folder = self._folder(step)
        progress = {"step": step, "best": best, "began_with": self.initial_fingerprint}
        self._in_flight = _Checkpoint(folder, best)
        error = self.further.save(folder, step) or self._ask("save_checkpoint", folder, progress, state)
        self.saved_at = time.monotonic()
        if error is not None:
            self._in_flight = None
        if not self.config.in_background:
            error = error or self._settle(waits=True)
        return before or error

    def is_best(self, metric: float | None) -> bool:
        """Whether a step with this metric must be kept as the best so far, also compared with the checkpoint being
        written."""
        best = self.best if self._in_flight is None else self._in_flight.best
        return self._saves_best and metric is not None and self._is_better(metric, best)

    @property
    def _saves_best(self) -> bool:
        saves = self.config.every_steps is not None or self.config.every_minutes is not None
        return self.config.keep_best and saves

    def is_unmeasured(self, step: int) -> bool:
        """Whether a step's checkpoint must be kept until its metric is known."""
        return self._saves_best and self.unmeasured_step == step

    def record_metric(self, step: int, metric: float) -> None:
        """Records the metric of an earlier step, whose checkpoint becomes the best if none is better."""
        with self._selection_lock:  # a thread may be removing checkpoints, but not the awaited one
            if self.unmeasured_step == step:
                self.unmeasured_step = None
            best, written = {"step": step, "metric": metric}, self._in_flight
            is_complete = self._folder(step).exists()
            if is_complete and self._is_better(metric, self.best):
                self.best = best
            is_there = is_complete or (written is not None and written.folder == self._folder(step))
            if written is not None and is_there and self._is_better(metric, written.best):
                self._in_flight = replace(written, best=best)

    def _is_better(self, metric: float, best: dict[str, float] | None) -> bool:
        return math.isfinite(metric) and (best is None or self.sign * metric > self.sign * best["metric"])

    def poll(self) -> str | None:
        """Returns the last checkpoint's error; None if it succeeded or is not done."""
        return self._settle(waits=False)

    def finish(self) -> str | None:
        """Waits for checkpoints being written. Returns the last one's error, or None."""
        error = self._settle(waits=True)
        self._join()
        self._warning = self._end_export() or self._warning
        return error

    def warning(self) -> str | None:
        """Returns a warning about anything else that went wrong, once."""
        warning, self._warning = self._warning, None
        return warning

    def _settle(self, waits: bool) -> str | None:
        """Checks on the last checkpoint, and once it is complete, removes those not kept. Returns its error, or None
        if it succeeded or is not done."""
        if self._in_flight is None:
            return None
        settled: CheckpointStatus = self._ask("checkpoint_status", waits)
        if not settled.is_done:
            return None
        written, self._in_flight, self.seconds = self._in_flight, None, settled.seconds
        if settled.error is None:
            self.best = written.best
            self._join()
            self._cleanup_thread = threading.Thread(target=self._tidy, args=(written,), name="checkpoint")
            self._cleanup_thread.start()
        return settled.error

    def _tidy(self, written: _Checkpoint) -> None:
        """Does slow work after a checkpoint is complete, in a thread. Failures only cause a warning."""
        try:
            warning = self._keep_chosen(written)
        except OSError as error:
            warning = f"{written.folder} is complete, but the work after it failed ({error.strerror})"
        self._warning = warning or self._warning

    def _join(self) -> None:
        if self._cleanup_thread is not None:
            self._cleanup_thread.join()
            self._cleanup_thread = None

    def _keep_chosen(self, written: _Checkpoint) -> str | None:
        """Removes the checkpoints that are not kept after a newer one is complete. Returns a warning, or None."""
        warning = self._end_export()
        with self._selection_lock:
            done = [path for path in self.directory.list_checkpoints() if step_of(path) <= step_of(written.folder)]
            keep = {*done[-self.config.keep_last :], *self._candidates(written)}
            try:
                self.directory.remove_checkpoints([path for path in done if path not in keep])
                kept = {path.name for path in self.directory.list_checkpoints()}
                self.further.remove_others(kept)
            except OSError as error:
                warning = f"older checkpoints could not be removed ({error.strerror})"
        if self.config.format == "both":
            self._export = self._begin_export(written.folder)
        return warning

    def _candidates(self, written: _Checkpoint) -> set[Path]:
        if not self.config.keep_best:
            return set()
        steps = [best["step"] for best in (written.best, self.best) if best is not None]
        return {self._folder(step) for step in (*steps, self.unmeasured_step) if step is not None}

    def _begin_export(self, folder: Path) -> _Export:
        """Starts making the Hugging Face copy, in a process that is not a rank, uses no device and ends with this
        one."""
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
        """Waits for the Hugging Face copy. Returns its error, or None."""
        if self._export is None:
            return None
        export, self._export = self._export, None
        _, errors = export.process.communicate()
        os.close(export.our_end)
        if export.process.returncode == 0:
            return None
        said = (errors.strip().splitlines() or ["it exited without output"])[-1]
        return f"{export.folder / HF_COPY} could not be written ({said})"

    def _say_differences(self, folder: Path, say: Callable[[str], None]) -> None:
        with contextlib.suppress(InputError):
            there = completed(read_yaml(folder / CONFIG), self.directory.config)
            keys = differing_keys(there, parse_yaml(self.directory.config_text))
            if keys:
                say(f"resuming from {folder}, of a run that differs in {', '.join(keys[:8])}")
