"""What surrounds the steps of every trainer: the run directory, metrics, console, checkpoints and stopping."""

import contextlib
import gc
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from automodel_rl.config import RunConfig
from automodel_rl.data.chat import ChatTokenizer, open_chat_tokenizer
from automodel_rl.data.loader import PackedStep
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError, JobEndedError, StoppedError
from automodel_rl.hf.read import read_supported_config
from automodel_rl.import_path import import_function
from automodel_rl.launch.flight import flight, flight_file
from automodel_rl.launch.stop_signal import StopSignal
from automodel_rl.launch.watchdog import set_hang_limit
from automodel_rl.losses import LossFn
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.console import Progress
from automodel_rl.observe.metrics import MetricsFile, read_metrics
from automodel_rl.observe.report import Sample, write_report
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.observe.trackers import Tracker, check_trackers, make_trackers
from automodel_rl.parallel.host_collectives import any_rank, gather_objects
from automodel_rl.trainers.run_checkpoints import NEVER, RunCheckpoints
from automodel_rl.trainers.step import Step


class Resumable(Protocol):
    """Something with a place that a resumed run goes back to. The place is JSON."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Goal:
    """Where a run goes.

    Attributes:
        total_steps: of the whole run.
        max_minutes: after which the run saves and stops, counted from the start of the process; None for no limit.
        best_metric: the metric by which the best checkpoint is told.
        higher_is_better: whether its largest value is the best.
    """

    total_steps: int
    max_minutes: float | None = None
    best_metric: str = "val/loss"
    higher_is_better: bool = False


class Run:
    """A run of a number of steps. A trainer does the step; this does what comes around it.

    A trainer makes its parts in this order: what needs the model's first weights, then the run, then `resume`, which
    may put a checkpoint in the place of those weights, then `steps`.

    Args:
        config: of the run.
        directory: its files.
        engine: what is trained.
        goal: where the run goes.

    Attributes:
        is_finished: the run that is to go on is done; there is nothing to write.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, engine: Engine, goal: Goal):
        self.config, self.directory, self.engine, self.goal = config, directory, engine, goal
        self.total_steps = goal.total_steps
        self.ends_at = None if goal.max_minutes is None else flight.started + 60 * goal.max_minutes
        self._parts: dict[str, Resumable] = {}
        self.step = 0
        self.is_finished = False
        self.is_first_rank = dist.get_rank() == 0
        self.mentioned_overlong = False
        self.trackers: list[Tracker] = []
        self.progress = Progress(goal.total_steps, 0, quiet=not self.is_first_rank)
        self.checkpoints = RunCheckpoints(config, directory, engine, goal.higher_is_better)
        engine.keep_microbatches_in = directory.not_finite

    def resume(self, parts: dict[str, Resumable]) -> None:
        """Goes on from the checkpoint that was asked for, if there is one.

        Args:
            parts: by name what has a place in the run, which is stored with every checkpoint.

        Raises:
            InputError: none can be used, or the run is past its end.
        """
        self._parts = parts
        if self.directory.resume == NEVER:
            return
        finished = self.directory.is_finished(self.total_steps)
        self.is_finished = gather_objects(finished, self.engine.handle.layout.world_control)[0]
        if self.is_finished:
            self.step = self.total_steps
            return
        stored = self.checkpoints.resume(self.directory.resume, self.say)
        if stored is not None:
            progress, rank_state = stored
            self.step = progress["step"]
            self.go_back_to(rank_state)
        self.directory.check_length(self.total_steps)

    def place(self) -> dict[str, Any]:
        """The place of this rank's parts in the run, as JSON."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def go_back_to(self, place: dict[str, Any]) -> None:
        """Puts all parts back to what `place` gave."""
        for name, part in self._parts.items():
            part.load_state_dict(place[name])

    def steps(self, summary: str, baseline: Callable[[], dict[str, Any]] | None = None) -> Iterator[Step]:
        """Yields every step that is left; when the trainer is done with it, shows, stores and checkpoints.

        Args:
            summary: one line on what runs, for the console.
            baseline: metrics of the untrained model, taken as those of step 0.

        Raises:
            StoppedError: SIGTERM, SIGHUP or Ctrl-C came, or the time is up; a checkpoint is saved.
        """
        self.progress = Progress(self.total_steps, self.step, quiet=not self.is_first_rank)
        with StopSignal() as stop, self.progress, self._tracking(), _short_collections():
            if self.directory.begins_anew:
                self.progress.say(
                    f"{self.directory.folder} holds a run that finished no step; this one takes its place"
                )
            start = f", going on from step {self.step}" if self.step else ""
            self.progress.say(f"{self.total_steps} steps{start}: {summary}")
            if self.step == 0 and baseline is not None:
                with flight.top_phase("baseline"):
                    self._write({"step": 0, **baseline()})
            while not self.is_over:
                self.step += 1
                step = Step(self.step, self.engine, self.config, self.say)
                with flight.top_phase(f"step {self.step}"):
                    yield step
                    self._write(step.metrics)
                    self._end_step(step, stop)
            self._warn(self.checkpoints.finish())

    def _end_step(self, step: Step, stop: StopSignal) -> None:
        """Checkpoints if it is time to, and stops if it was asked to."""
        seconds = time.perf_counter() - step.started + self.checkpoints.seconds
        late = self.ends_at is not None and time.time() + seconds > self.ends_at
        # Clocks differ: the first rank's counts.
        asked = [bool(stop), late and self.is_first_rank, self.checkpoints.is_due() and self.is_first_rank]
        stopped, late, due = any_rank(asked, self.engine.handle.layout)
        stops = (stopped or late) and not self.is_over
        self._warn(self.checkpoints.poll())
        if stops or due or self.is_due(self.config.checkpoint.every_steps):
            self.save_checkpoint(step.metrics.get(self.goal.best_metric))
        if stops:
            self._stop(stop.name or ("a signal to another rank" if stopped else "--max-minutes"))

    def _stop(self, by: str) -> None:
        error = self.checkpoints.finish()
        if error is not None:
            raise JobEndedError(
                f"error: stopped by {by} after step {self.step}, and its checkpoint could not be written ({error}): "
                "--resume auto goes on from the one before"
            )
        raise StoppedError(f"stopped by {by} after step {self.step}: add --resume auto to go on")

    def _warn(self, error: str | None) -> None:
        if error is not None:
            self.say(f"warning: a checkpoint could not be written ({error}); training goes on, older ones are intact")
        warning = self.checkpoints.warning()
        if warning is not None:
            self.say(f"warning: {warning}")

    @contextlib.contextmanager
    def _tracking(self) -> Iterator[None]:
        """Within this block metrics go to metrics.jsonl and to what the config names, on the first rank."""
        with contextlib.ExitStack() as stack:
            if self.is_first_rank:
                self.directory.create()
                stack.enter_context(self.directory.in_use())
                others = make_trackers(self.config.observe, self.directory, self.step)
                self.trackers = [MetricsFile(self.directory.metrics, self.step), *others]
            dist.barrier(self.engine.handle.layout.world_control)  # until the folder is there
            flight.keep_in(flight_file(self.directory.flights, dist.get_rank()))
            for tracker in self.trackers:
                stack.callback(tracker.close)
            yield

    def _write(self, record: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.write(record)
        self.progress.show(record)

    def is_due(self, every: int | None) -> bool:
        """Whether something that happens `every` so many steps, and at the end, happens in this step."""
        return every is not None and (self.step % every == 0 or self.is_over)

    @property
    def validates(self) -> bool:
        """Whether this step validates; the last one always does."""
        return self.is_over or self.is_due(self.config.length.validate_every)

    @property
    def steps_left(self) -> int:
        """Steps that are not done, the running one included."""
        return self.total_steps - self.step + 1

    @property
    def is_over(self) -> bool:
        return self.step >= self.total_steps

    def say(self, text: str) -> None:
        """A line that stays on the console."""
        self.progress.say(text)

    def save_checkpoint(self, metric: float | None = None) -> None:
        """Args: metric of this step, by which the best checkpoint is told; None if it was not measured."""
        with flight.phase("checkpoint"):
            self._warn(self.checkpoints.save(self.step, self.place(), metric))

    def abandon_step(self, before: dict[str, Any]) -> None:
        """Stores the run as it was before the running step, which cannot be done.

        Args:
            before: the place before the step.
        """
        self.go_back_to(before)
        self.step -= 1
        if self.step:
            self.save_checkpoint()
        self._warn(self.checkpoints.finish())

    def end_with(self, step: Step) -> None:
        """Stores a step that is trained, and what is known of it, because the run cannot go on."""
        self._write(step.metrics)
        self.save_checkpoint()
        self._warn(self.checkpoints.finish())

    def note_overlong(self, step: Step, packed: PackedStep) -> None:
        """Notes examples that were cut or left out, and says so on the console, once in a run."""
        step.metrics |= {"data/num_truncated": packed.num_truncated, "data/num_dropped": packed.num_dropped}
        if self.mentioned_overlong or not packed.num_truncated + packed.num_dropped:
            return
        self.mentioned_overlong = True
        self.say(
            f"warning: in a step, {packed.num_truncated} examples were truncated to "
            f"batch.microbatch_tokens={self.config.batch.microbatch_tokens} or the model's context and "
            f"{packed.num_dropped} dropped; metrics.jsonl counts them in every step"
        )

    def save_model(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Writes the trained checkpoint.

        Raises:
            JobEndedError: it could not be written.
        """
        with flight.top_phase("saving the model"):
            try:
                self.engine.handle.save_pretrained(self.directory.final, tokenizer)
            except (OSError, SafetensorError) as error:
                raise JobEndedError(
                    f"error: {self.directory.final} could not be written ({error}): make room or change its rights; "
                    "--resume auto then writes it"
                ) from error

    def finish(self, title: str, samples: list[Sample]) -> Path:
        """Writes the report and says where everything is. The trainer has saved the model.

        Returns:
            The folder of the trained checkpoint.
        """
        if self.is_first_rank:
            write_report(self.directory.report, title, read_metrics(self.directory.metrics), samples)
            self.directory.note_finished(self.total_steps)
        return self._show_results()

    def leave_finished(self) -> Path:
        """Says that the run was finished before, and where everything is.

        Returns:
            The folder of the trained checkpoint.
        """
        self.progress.say(f"the run in {self.directory.folder} is finished: its {self.total_steps} steps are done")
        return self._show_results()

    def _show_results(self) -> Path:
        self.progress.say(f"model: {self.directory.final}\nreport: {self.directory.report}")
        return self.directory.final


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """Within this block Python's garbage collector leaves alone what is there now. Looking through all that libraries
    have made takes a large part of a second, in which a device has nothing to do."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def open_run(config: RunConfig, resume: str) -> tuple[RunDirectory, ChatTokenizer, ModelHandle]:
    """What every trainer starts with: the run directory, checked but not written to, the tokenizer, and the model.

    Raises:
        InputError: something in the config or the checkpoint is wrong. What the weights do not tell is found before
            they are loaded.
    """
    directory = RunDirectory(config, config.output, resume)
    set_hang_limit(config.failures.hang_minutes)
    directory.take_nccl_traces()
    check_trackers(config.observe)
    read_supported_config(config)
    chat = open_chat_tokenizer(config)
    handle = ModelHandle.from_pretrained(config.model, config.parallel, config.memory, config.components)
    torch.manual_seed(config.seed + dist.get_rank())
    return directory, chat, handle


def choose_loss(config: RunConfig, default: LossFn) -> LossFn:
    """The loss that the config names, else the algorithm's own."""
    if config.loss_function is None:
        return default
    function = import_function("loss_function", config.loss_function)
    try:
        inspect.signature(function).bind("outputs", "batch")
    except (TypeError, ValueError) as error:
        raise InputError(
            f"loss_function={config.loss_function}: cannot be called as function(outputs, batch) ({error}): give a "
            "function of these two"
        ) from None
    return function


def layout_summary(config: RunConfig, handle: ModelHandle) -> str:
    """Layout, precision, device and folder of a run, for the console."""
    where = f"{config.model.dtype} on {handle.layout.device.type}, in {config.output}"
    return f"{config.components or config.parallel}, {where}"
