"""The frame around a program's steps: run directory, metrics, console, checkpoints and stopping."""

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from automodel_rl.config import RewardConfig
from automodel_rl.data.checks import reader_of
from automodel_rl.data.prompts import PromptStream
from automodel_rl.data.show import ShownExample
from automodel_rl.errors import JobEndedError, StoppedError
from automodel_rl.files import write_atomic
from automodel_rl.generators.fleet import Fleet
from automodel_rl.launch.flight import flight
from automodel_rl.launch.stop_signal import StopSignal
from automodel_rl.launch.timeline import TRAINER, StepTimeline
from automodel_rl.observe.console import Progress, SlowWork
from automodel_rl.observe.metrics import MEASURED, MetricsFile, write_lines
from automodel_rl.observe.trackers import Tracker, make_trackers
from automodel_rl.optimizers import learning_rate, warmup_steps
from automodel_rl.policy.policy import Policy
from automodel_rl.report.page import write_report
from automodel_rl.rollout.rollouts import Rollouts
from automodel_rl.trainers.open_run import OpenedRun
from automodel_rl.trainers.run_checkpoints import NEVER, RunCheckpoints
from automodel_rl.trainers.samples import Sample
from automodel_rl.trainers.step import Step


class Resumable(Protocol):
    """A part of a run with a JSON state that a resumed run restores."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


REFERENCE = "reference"
"""Name of the run's initial weights, where a program keeps them."""

LATER_PARTS = ("validation",)
"""Parts that checkpoints of earlier releases lack."""

EARLY = 2
"""Initial steps in which layers may be compiled: the first with gradients, the next without."""


@dataclass(frozen=True)
class Goal:
    """The length of a run, and the metric that selects its best checkpoint.

    Attributes:
        total_steps: number of steps of the whole run.
        best_metric: the metric that selects the best checkpoint.
        higher_is_better: whether larger values of it are better.

    Example:
        >>> Goal(100, "val/accuracy", higher_is_better=True).total_steps
        100
    """

    total_steps: int
    best_metric: str = "val/loss"
    higher_is_better: bool = False


class Run:
    """A run of several steps. The program does the work of each step, this class everything around it.

    Call order: the program calls `policy.begin`, sets up whatever needs the model's initial weights, and calls
    `resume`, which may load a checkpoint over those weights. Then it iterates over `steps`, and finally calls
    `finish`.

    Args:
        opened: the run's config, files, tokenizer and model.
        policy: the model in training.
        further: the models beside it, by name.
        max_minutes: minutes from the start of the process after which the run saves and stops; None for no limit.

    Attributes:
        config, directory, chat, handle: those of `opened`.
        further: the models beside the trained one, by name.
        is_finished: whether the run to resume is already finished, so that no steps remain.

    Example:
        >>> import torch
        >>> def program(policy, fleet, run):
        ...     policy.begin()
        ...     run.resume(Goal(2), {})
        ...     batch = Batch([TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, False, True]))])
        ...     for step in run.steps("one row a step"):
        ...         step.record([policy.train_step(batch, sft_loss)], policy.size(batch))
        ...     return run.finish().name
        >>> run_program(program, load_config("my_sft.yaml"))  # doctest: +ELLIPSIS
        loading ...
        2 steps: one row a step, ...
        'final'
    """

    def __init__(
        self,
        opened: OpenedRun,
        policy: Policy,
        further: Mapping[str, Policy] | None = None,
        max_minutes: float | None = None,
    ):
        self.config, self.directory, self.further = opened.config, opened.directory, dict(further or {})
        self.chat, self.handle, self.policy = opened.chat, opened.handle, policy
        self.ends_at = None if max_minutes is None else flight.started + 60 * max_minutes
        self.goal = Goal(0)
        self._parts: dict[str, Resumable] = {}
        self._open = contextlib.ExitStack()
        self.timeline = StepTimeline()
        self.step = 0
        self.is_finished = False
        self.trackers: list[Tracker] = []
        self.progress = Progress(0, 0)
        self._planned_steps: int | None = None
        self.checkpoints: RunCheckpoints

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.chat.tokenizer

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        return self.goal.total_steps

    def prompts(self, tools: Sequence[dict[str, Any]] = (), *, held_out: bool = False) -> PromptStream:
        """Returns a stream of the run's prompts.

        Args:
            tools: JSON schemas of the tools that prompts offer.
            held_out: draw the validation prompts, in order.

        Raises:
            InputError: a source cannot be read.
        """
        data, most = self.config.data, self.config.rollout.max_prompt_tokens
        seed = self.config.seed if data.shuffle and not held_out else None
        sources, read = data.validation if held_out else data.train, reader_of(self.config)
        return PromptStream(sources, self.chat, most, seed, tools, read, drops_refused=data.on_bad_record == "drop")

    def rollouts(self, fleet: Fleet, rewards: Sequence[RewardConfig]) -> Rollouts:
        """Returns the source of rewarded completions. Tools, environments and `rewards` start at once, and end with
        the run. The generators of `fleet` may be started later.

        Raises:
            InputError: a tool, the environment or a reward cannot be started.
        """
        rollouts = Rollouts(
            self.config,
            fleet,
            rewards,
            self.chat.template,
            self.directory.environments,
            self.timeline.add,
            lambda total: SlowWork(self.say, "completions", str(total)).note,
        )
        self._open.callback(rollouts.close)
        return rollouts

    def at_end(self, work: Callable[[], None]) -> None:
        """Registers `work` to be called at the end of the run, however it ends, in reverse order."""
        self._open.callback(work)

    def close(self) -> None:
        """Ends the processes started for the run."""
        self._open.close()

    def resume(self, goal: Goal, parts: dict[str, Resumable]) -> None:
        """Restores the requested checkpoint, if any.

        Args:
            goal: the run's length and best-checkpoint metric.
            parts: the run's resumable parts by name. Their states are stored with every checkpoint.

        Raises:
            InputError: no checkpoint is usable, the run is past its end, or another run is using the folder.
        """
        self.goal, self._parts = goal, parts
        self.progress = Progress(goal.total_steps, 0)
        self.checkpoints = RunCheckpoints(
            self.config, self.directory, self.policy, self.handle, self._trained_beside, goal.higher_is_better
        )
        if self.directory.resume == NEVER:
            return
        self.directory.lock()
        self._planned_steps = self.directory.planned_steps
        with self._unlocking_on_failure():
            self._restore()

    def _restore(self) -> None:
        self.is_finished = self.directory.is_finished(self.total_steps)
        if self.is_finished:
            self.step = self.total_steps
            return
        stored = self.checkpoints.resume(self.directory.resume, self.say)
        if stored is not None:
            progress, state = stored
            self.step = progress["step"]
            self.restore_state(state)
        self.directory.check_length(self.total_steps)

    @property
    def _trained_beside(self) -> dict[str, Policy]:
        asked = self.config.further_models
        return {name: model for name, model in self.further.items() if asked[name].is_trained}

    def state(self) -> dict[str, Any]:
        """Returns the states of the resumable parts, as JSON values."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restores the states of all resumable parts from `state`, a result of `Run.state`."""
        for name, part in self._parts.items():
            if name in state or name not in LATER_PARTS:
                part.load_state_dict(state[name])

    def steps(self, summary: str, baseline: Callable[[], dict[str, Any]] | None = None) -> Iterator[Step]:
        """Yields the remaining steps. After the program's work on a step, shows and stores its metrics, and saves a
        checkpoint if one is due.

        Args:
            summary: what a step trains on, for the console.
            baseline: measures the untrained model; its metrics are those of step 0.

        Raises:
            StoppedError: the run was stopped by SIGTERM, SIGHUP, Ctrl-C or its time limit; a checkpoint is saved.
        """
        if self.is_finished:
            return
        self.progress = Progress(self.total_steps, self.step)
        with StopSignal(self.policy.crew.signals) as stop, self.progress, self._tracking(), _short_collections():
            if self.directory.replaces_empty_run:
                self.progress.say(f"{self.directory.folder} holds a run that finished no step; this run replaces it")
            start = f", resuming from step {self.step}" if self.step else ""
            self.progress.say(f"{self.total_steps} steps{start}: {summary}, {self._where}")
            if self.directory.changes and self.step:
                self.progress.say(f"changed since it was stopped: {', '.join(self.directory.changes)}")
            self._warn_of_a_long_warmup()
            self._warn_of_another_rate()
            if self.step == 0 and baseline is not None:
                self.phase("measuring the untrained model")
                with flight.top_phase("baseline"):
                    self._write({"step": 0, **baseline()})
                    self.timeline.take(time.time())  # discards the baseline's spans
            first = self.step + 1
            self.phase("training" + (": the first step also compiles layers" if self.handle.memory.compile else ""))
            while not self.is_over:
                self.step += 1
                is_early = self.step < first + EARLY
                step = Step(self.step, self.handle, self.config, self.say, self.timeline, is_early)
                with flight.top_phase(f"step {self.step}"):
                    yield step
                    self._write(step.metrics)
                    self._write_timeline(step)
                    self._end_step(step, stop)
            self._warn(self.checkpoints.finish())

    def _write_timeline(self, step: Step) -> None:
        lanes = self.timeline.take(step.began)
        if any(lane["lane"] != TRAINER for lane in lanes):
            self.write_step_file("timeline", self.directory.timelines, lanes)

    def _end_step(self, step: Step, stop: StopSignal) -> None:
        """Saves a checkpoint if one is due, and stops the run on request or if its time is up."""
        self.directory.check_own()
        seconds = time.perf_counter() - step.started + self.checkpoints.seconds
        late = self.ends_at is not None and time.time() + seconds > self.ends_at
        is_own = step.metrics.get(MEASURED, self.step) == self.step
        metric = step.metrics.get(self.goal.best_metric) if is_own else None
        due = self.checkpoints.is_due() or self.checkpoints.is_best(metric) or self.checkpoints.is_unmeasured(self.step)
        elsewhere = "a signal to another rank" if self.policy.crew.signals else None
        asked = stop.name or elsewhere or ("--max-minutes" if late else None)
        stops = asked is not None and not self.is_over
        self._warn(self.checkpoints.poll())
        if stops or due or self.is_due(self.config.checkpoint.every_steps):
            self.save_checkpoint(metric)
            self._write_report("stopped" if stops else "running")
        if asked is not None and stops:
            self._stop(asked)

    def _stop(self, by: str) -> None:
        error = self.checkpoints.finish()
        if error is not None:
            raise JobEndedError(
                f"error: stopped by {by} after step {self.step}, and its checkpoint could not be written ({error}): "
                "--resume auto resumes from the previous one"
            )
        raise StoppedError(f"stopped by {by} after step {self.step}: resume with --resume auto")

    def _warn(self, error: str | None) -> None:
        if error is not None:
            self.say(f"warning: a checkpoint could not be written ({error}); training continues, older ones are intact")
        warning = self.checkpoints.warning()
        if warning is not None:
            self.say(f"warning: {warning}")

    @contextlib.contextmanager
    def _tracking(self) -> Iterator[None]:
        """Starts the trackers, including metrics.jsonl, and closes them after the block."""
        with contextlib.ExitStack() as stack, self._unlocking_on_failure():
            self.directory.create(self.total_steps)
            others = make_trackers(self.config.observe, self.directory, self.step)
            self.trackers = [MetricsFile(self.directory.metrics, self.step), *others]
            self.policy.record_flight_in(self.directory.flights)
            for tracker in self.trackers:
                stack.callback(tracker.close)
            yield

    @contextlib.contextmanager
    def _unlocking_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.directory.unlock()
            raise

    def _write(self, record: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.write(record)
        self.progress.show(record)

    def is_due(self, every: int | None) -> bool:
        """Whether something that happens every `every` steps and in the last one is due; None means never."""
        return every is not None and (self.step % every == 0 or self.is_over)

    @property
    def validates(self) -> bool:
        """Whether this step validates; the last one always does."""
        return self.validates_in(self.step)

    def validates_in(self, step: int) -> bool:
        """Whether step number `step` validates."""
        every = self.config.length.validate_every
        return step >= self.total_steps or (every is not None and step % every == 0)

    @property
    def steps_left(self) -> int:
        """Number of remaining steps, including the current one."""
        return self.total_steps - self.step + 1

    @property
    def _where(self) -> str:
        config = self.config
        where = f"{config.model.dtype} on {self.handle.layout.device.type}, in {config.output}"
        return f"{config.components or config.parallel}, {where}"

    def _warn_of_a_long_warmup(self) -> None:
        total = self.policy.total_steps
        warmup = warmup_steps(self.config.optimizer, total)
        if total is not None and warmup >= total:
            self.progress.say(
                f"warning: the warm-up of {warmup} steps is not shorter than the run's {total} optimizer steps: the "
                "learning rate reaches its peak in the last step or never"
            )

    def _warn_of_another_rate(self) -> None:
        """Warns if a resumed run's new length changes its next learning rate."""
        planned, total = self._planned_steps, self.policy.total_steps
        if not self.step or planned is None or total is None:
            return
        each = total / self.total_steps  # optimizer steps per step
        was, now = (
            learning_rate(self.config.optimizer, self.step * each, round(steps * each))
            for steps in (planned, self.total_steps)
        )
        if not math.isclose(was, now):
            self.progress.say(
                f"warning: the run was planned for {planned} steps and now has {self.total_steps}, so after step "
                f"{self.step} optimizer.decay={self.config.optimizer.decay} continues with a learning rate of "
                f"{now:.3g} instead of {was:.3g}"
            )

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or the current one is the last."""
        return self.step >= self.total_steps

    def say(self, text: str) -> None:
        """Prints `text` as a permanent line on the console."""
        self.progress.say(text)

    def phase(self, text: str) -> None:
        """Shows what the run is doing: on the console, and on the page of a run that is watched.

        Args:
            text: what it is doing until its next step.
        """
        self.progress.phase(text)
        with contextlib.suppress(OSError):
            write_atomic(self.directory.phase, text)

    def save_checkpoint(self, metric: float | None = None) -> None:
        """Saves a checkpoint of this step. `metric` is the value of the goal's metric; None if it was not measured."""
        with flight.phase("checkpoint"):
            self._warn(self.checkpoints.save(self.step, self.state(), metric))

    def abandon_step(self, before: dict[str, Any]) -> None:
        """Abandons the current step, and saves a checkpoint of the run at `before`, the result of `state` before the
        step."""
        self.restore_state(before)
        self.step -= 1
        if self.step:
            self.save_checkpoint()
        self._warn(self.checkpoints.finish())

    def end_with(self, step: Step) -> None:
        """Stores the metrics and a checkpoint of a trained `step` after which the run cannot continue."""
        self._write(step.metrics)
        self.save_checkpoint()
        self._warn(self.checkpoints.finish())

    def _save_model(self) -> None:
        if self.config.checkpoint.load_best:
            with flight.top_phase("loading the best checkpoint"):
                self._load_best()
        with flight.top_phase("saving the model"):
            self.phase(f"saving the model to {self.directory.final}")
            note = self.policy.save(self.directory.final)
        if note:
            self.say(f"{self.directory.final}: {note}")

    def _load_best(self) -> None:
        best = self.checkpoints.load_best(self.step)
        if best is not None:
            name = self.goal.best_metric
            self.say(f"final/ is the best checkpoint, of step {best['step']:.0f}, with {name} {best['metric']:.5g}")
        elif self.checkpoints.best is None:
            self.say(f"warning: no checkpoint has {self.goal.best_metric}, so final/ is the last step, not the best")

    def save_samples(self, samples: list[Sample], step: int | None = None) -> None:
        """Stores completions for the report. `samples` belong to `step`; None for the current step."""
        if samples:
            records = [dataclasses.asdict(sample) for sample in samples]
            self.write_step_file("samples", self.directory.samples, records, step)

    def save_examples(self, examples: Callable[[], list[ShownExample]]) -> None:
        """Writes a few training sequences, with marks of what is trained, for the report. Calls `examples` only if
        they are wanted."""
        if self.config.observe.samples and not self.is_finished:
            records = [dataclasses.asdict(example) for example in examples()]
            self.write_step_file("examples", self.directory.examples, records)

    def write_step_file(self, what: str, folder: Path, records: list[dict[str, Any]], step: int | None = None) -> None:
        """Writes `records` as the file of a step in `folder`. Failures only cause a warning, which calls the records
        `what`. `step` is None for the current step."""
        step = self.step if step is None else step
        try:
            write_lines(folder / f"step_{step}.jsonl", records)
        except OSError as error:
            self.say(f"warning: the {what} of step {step} cannot be written ({error.strerror})")

    def _write_report(self, status: str) -> None:
        try:
            write_report(self.directory.report, [self.directory.folder], status)
        except OSError as error:
            self.say(f"warning: {self.directory.report} cannot be written ({error.strerror})")

    def finish(self, samples: Callable[[], list[Sample]] = list) -> Path:
        """Saves the model, writes the report, and prints where they are; for a run that was already finished, only
        prints.

        Args:
            samples: generates completions of the trained model for the report.

        Returns:
            The folder of the trained checkpoint.

        Raises:
            JobEndedError: the model could not be written.
        """
        if self.is_finished:
            self.say(f"the run in {self.directory.folder} is finished: its {self.total_steps} steps are done")
        else:
            self._save_model()
            self.save_samples(samples())
            self._write_report("finished")
            self.directory.note_finished(self.total_steps)
        return self._show_results()

    def _show_results(self) -> Path:
        self.directory.unlock()
        self.progress.say(f"model: {self.directory.final}\nreport: {self.directory.report}")
        return self.directory.final


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """Excludes existing objects from garbage collection during the block: scanning all library objects takes a good
    part of a second, while the device is idle."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
