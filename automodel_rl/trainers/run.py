"""What surrounds the steps of every trainer: the run directory, metrics, console, checkpoints and stopping."""

import contextlib
import itertools
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from automodel_rl.config import LengthConfig, RunConfig, SourceConfig
from automodel_rl.data.loader import PackedStep
from automodel_rl.data.mixture import GlobalBatches
from automodel_rl.engine import Engine, TrainOutput
from automodel_rl.engine.checkpoint import load_checkpoint, save_checkpoint
from automodel_rl.errors import InputError, StoppedError
from automodel_rl.launch.stop_signal import StopSignal
from automodel_rl.model.flops import peak_flops
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.console import Progress
from automodel_rl.observe.metrics import MetricsFile, read_metrics
from automodel_rl.observe.report import Sample, write_report
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.parallel.host_reduce import any_rank


class Run:
    """A run of a number of steps. A trainer does the step; this does what comes around it.

    Args:
        config: of the run.
        directory: its files.
        engine: what is trained.
        total_steps: of the whole run.
        rank_state: gives what each rank must store besides the engine to go on, such as its data loader's place.
        best_metric: by which the best checkpoint is told.
        higher_is_better: of that metric.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        engine: Engine,
        total_steps: int,
        rank_state: Callable[[], dict[str, Any]],
        best_metric: str = "val/loss",
        higher_is_better: bool = False,
    ):
        self.config, self.directory, self.engine = config, directory, engine
        self.total_steps, self.rank_state = total_steps, rank_state
        self.best_metric, self.sign = best_metric, 1 if higher_is_better else -1
        self.step = 0
        self.best: dict[str, float] | None = None
        self.is_first_rank = dist.get_rank() == 0

    def resume(self) -> dict[str, Any]:
        """Goes on from the newest checkpoint, if there is one.

        Returns:
            What `rank_state` gave when it was written; empty if there is none.
        """
        checkpoints = self.directory.list_checkpoints()
        if not checkpoints:
            return {}
        progress, rank_state = load_checkpoint(self.engine, checkpoints[-1])
        self.step, self.best = progress["step"], progress["best"]
        return rank_state

    def steps(self, summary: str, baseline: Callable[[], dict[str, Any]] | None = None) -> Iterator["Step"]:
        """Yields every step that is left; when the trainer is done with it, shows, stores and checkpoints.

        Args:
            summary: one line on what runs, for the console.
            baseline: metrics of the untrained model, taken as those of step 0.

        Raises:
            StoppedError: SIGTERM or Ctrl-C came; a checkpoint is saved.
        """
        if self.is_first_rank:
            self.directory.create()
            metrics = MetricsFile(self.directory.metrics, self.step)
        with StopSignal() as stop, Progress(self.total_steps, self.step, not self.is_first_rank) as self.progress:
            start = f", going on from step {self.step}" if self.step else ""
            self.progress.say(f"{self.total_steps} steps{start}: {summary}")
            if self.step == 0 and baseline is not None:
                row = {"step": 0, **baseline()}
                if self.is_first_rank:
                    metrics.write(row)
                self.progress.show(row)
            while not self.is_over:
                self.step += 1
                step = Step(self)
                yield step
                if self.is_first_rank:
                    metrics.write(step.row)
                self.progress.show(step.row)
                stopping = any_rank(bool(stop), self.engine.handle.layout)
                if stopping or self.is_due(self.config.checkpoint.every):
                    self.save_checkpoint(step.row.get(self.best_metric))
                if stopping:
                    signal = stop.name or "a signal to another rank"
                    raise StoppedError(f"stopped by {signal} after step {self.step}: add --resume auto to go on")

    def is_due(self, every: int | None) -> bool:
        """Whether something that happens `every` so many steps, and at the end, happens in this step."""
        return every is not None and (self.step % every == 0 or self.is_over)

    @property
    def validates(self) -> bool:
        """Whether this step validates; the last one always does."""
        return self.is_over or self.is_due(self.config.length.validate_every)

    @property
    def is_over(self) -> bool:
        return self.step >= self.total_steps

    def say(self, text: str) -> None:
        """A line that stays on the console."""
        self.progress.say(text)

    def save_checkpoint(self, metric: float | None = None) -> None:
        """Args: metric of this step, by which the best checkpoint is told; None if it was not measured."""
        if metric is not None and (self.best is None or self.sign * metric > self.sign * self.best["metric"]):
            self.best = {"step": self.step, "metric": metric}
        folder = self.directory.checkpoints / f"step_{self.step}"
        save_checkpoint(self.engine, folder, {"step": self.step, "best": self.best}, self.rank_state())
        if self.is_first_rank:
            keep = set(self.directory.list_checkpoints()[-self.config.checkpoint.keep_last :])
            if self.config.checkpoint.keep_best and self.best is not None:
                keep.add(self.directory.checkpoints / f"step_{self.best['step']:.0f}")
            self.directory.keep_checkpoints(keep)

    def abandon_step(self) -> None:
        """Stores the run as it was before the running step, which cannot be done."""
        self.step -= 1
        if self.step:
            self.save_checkpoint()

    def finish(self, title: str, samples: list[Sample]) -> Path:
        """Writes the report and says where everything is. The trainer has saved the model.

        Returns:
            The folder of the trained checkpoint.
        """
        if self.is_first_rank:
            write_report(self.directory.report, title, read_metrics(self.directory.metrics), samples)
        self.progress.say(f"model: {self.directory.final}\nreport: {self.directory.report}")
        return self.directory.final


class Step:
    """One step's metrics in the making.

    Attributes:
        row: what metrics.jsonl gets.
    """

    def __init__(self, run: Run):
        self.run = run
        self.row: dict[str, Any] = {"step": run.step}
        self.started = time.perf_counter()

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Adds what its block takes to `time/NAME_s`."""
        started = time.perf_counter()
        yield
        key = f"time/{name}_s"
        self.row[key] = self.row.get(key, 0.0) + time.perf_counter() - started

    def record(self, outputs: list[TrainOutput]) -> None:
        """Notes what the step's updates gave: their means."""
        count = len(outputs)
        names = dict.fromkeys(name for output in outputs for name in output.metrics)
        self.row |= {
            "train/loss": sum(output.loss for output in outputs) / count,
            "train/grad_norm": sum(output.grad_norm for output in outputs) / count,
            "train/lr": outputs[-1].lr,
            "train/num_tokens": sum(output.num_tokens for output in outputs),
            "train/skipped": sum(output.skipped for output in outputs),
            **{name: sum(output.metrics.get(name, 0.0) for output in outputs) / count for name in names},
        }

    def record_performance(self, packed: PackedStep, row_tokens: int) -> None:
        """Notes sizes, speed and memory of a step over `packed`; called when it is trained, before any validation."""
        seconds = time.perf_counter() - self.started
        device = self.run.engine.handle.layout.device
        peak = peak_flops(device)
        self.row |= {
            "data/num_sequences": packed.num_sequences,
            "data/num_truncated": packed.num_truncated,
            "data/num_dropped": packed.num_dropped,
            "perf/tokens_per_second": packed.num_tokens / seconds,
            "perf/mfu": packed.flops / (seconds * peak * dist.get_world_size()) if peak else None,
            "perf/packing_efficiency": packed.num_tokens / (packed.num_rows * row_tokens),
            "time/step_s": seconds,
            "memory/peak_gib": _peak_memory(device) / 2**30,
        }


def count_steps(length: LengthConfig, sampler: GlobalBatches) -> int:
    """Steps of a run."""
    steps = length.steps or len(sampler)
    if steps == 0:
        raise InputError(f"length.epochs={length.epochs} is less than one example: raise it, or give steps")
    return steps


def first_loaded(steps: Iterable[PackedStep]) -> Iterator[PackedStep]:
    """The steps; the first is loaded now, so that what is wrong with it comes out before anything is written."""
    stream = iter(steps)
    return itertools.chain([next(stream)], stream)


def unweighted(sources: Sequence[SourceConfig]) -> list[SourceConfig]:
    """The same sources, of which a pass draws each record once."""
    return [source.model_copy(update={"weight": None}) for source in sources]


def where(config: RunConfig, handle: ModelHandle) -> str:
    """Layout, precision, device and folder of a run, for the console."""
    layout = " x ".join(f"{name} {size}" for name, size in config.parallel.sizes.items()) or "one rank"
    return f"{layout}, {config.model.dtype} on {handle.layout.device.type}, in {config.output}"


def overlong_warning(row_tokens: int) -> Callable[[PackedStep], str | None]:
    """Says once that examples are cut or left out; metrics.jsonl has the counts of every step."""
    mentioned = False

    def warning(packed: PackedStep) -> str | None:
        nonlocal mentioned
        if mentioned or not packed.num_truncated + packed.num_dropped:
            return None
        mentioned = True
        return (
            f"warning: in a step, {packed.num_truncated} examples were truncated to batch.row_tokens={row_tokens} and "
            f"{packed.num_dropped} dropped; metrics.jsonl counts them in every step"
        )

    return warning


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
