"""Metrics and timings of one step of a run."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from automodel_rl.batch import StepSize
from automodel_rl.compat.compilation import Compiled, compiled_so_far, compiler_cache
from automodel_rl.config import RunConfig
from automodel_rl.engine import TrainOutput
from automodel_rl.launch.flight import flight
from automodel_rl.launch.timeline import TRAINER, StepTimeline
from automodel_rl.losses.rollout_mismatch import EXTREMES
from automodel_rl.model.flops import peak_flops
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.peak_memory import peak_memory

NEARLY_FULL = 0.95
"""Share of device memory above which a step warns."""


class Step:
    """Collector of one step's metrics.

    Args:
        number: from 1.
        timeline: receives the phases of the step.
        is_early: whether layers may still be compiled, as in the first steps of a process.

    Attributes:
        metrics: the step's record for metrics.jsonl.
        began: `time.time()` at its start.
    """

    def __init__(
        self,
        number: int,
        handle: ModelHandle,
        config: RunConfig,
        say: Callable[[str], None],
        timeline: StepTimeline,
        is_early: bool = False,
    ):
        self.number, self.handle, self.config, self.say, self.is_early = number, handle, config, say, is_early
        self.metrics: dict[str, Any] = {"step": number}
        self.timeline, self.began = timeline, time.time()
        self.compiled_before = compiled_so_far() if handle.memory.compile else None
        self.started = time.perf_counter()

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Adds the seconds of the block to `time/NAME_s`."""
        started, began = time.perf_counter(), time.time()
        with flight.phase(name):
            yield
        self.timeline.add(TRAINER, began, name)
        key = f"time/{name}_s"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - started

    def record(self, outputs: list[TrainOutput], size: StepSize) -> None:
        """Records the optimizer steps' results, mostly as means, and the step's speed. Call it before validation.

        Args:
            outputs: one per optimizer step.
            size: total size of all optimizer steps.
        """
        count = len(outputs)
        nothing = sum(output.nothing_to_train for output in outputs)
        if nothing:
            where = "its batch" if count == 1 else f"{nothing} of its {count} batches"
            self.say(f"warning: step {self.number} had no trained token in {where}, which updated no weights")
        names = dict.fromkeys(name for output in outputs for name in output.metrics)
        seconds = time.perf_counter() - self.started
        device = self.handle.layout.device
        peak = peak_flops(device)
        self.metrics |= {
            "train/loss": sum(output.loss for output in outputs) / count,
            "train/grad_norm": sum(output.grad_norm for output in outputs) / count,
            "train/lr": outputs[-1].lr,
            "train/num_tokens": sum(output.num_tokens for output in outputs),
            "train/skipped": sum(output.skipped for output in outputs),
            "train/nothing_to_train": nothing,
            **{name: _combined(name, [o.metrics[name] for o in outputs if name in o.metrics]) for name in names},
            "data/num_sequences": size.num_sequences,
            "perf/tokens_per_second": size.num_tokens / seconds,
            "perf/mfu": size.flops / (seconds * peak * dist.get_world_size()) if peak else None,
            "perf/packing_efficiency": size.num_tokens / (max(1, size.num_microbatches) * self.config.batch.capacity),
            "data/microbatch_tokens": self.config.batch.capacity,
            "time/step_s": seconds,
            "memory/peak_gib": peak_memory(device) / 2**30,
        }
        if self.is_early and device.type == "cuda":
            self._check_memory(torch.cuda.get_device_properties(device).total_memory)
        if self.compiled_before is not None:
            self._record_compilation(compiled_so_far() - self.compiled_before)

    def _check_memory(self, num_bytes: int) -> None:
        """Warns if the step nearly filled the device, which has `num_bytes`: a later step may need a little more."""
        reserved = self.metrics["memory/peak_gib"]
        if reserved * 2**30 > NEARLY_FULL * num_bytes:
            self.say(
                f"warning: step {self.number} reserved {reserved:.0f} of {num_bytes / 2**30:.0f} GiB, and a later one "
                "may need more: lower batch.microbatch_tokens, or use memory.activation_checkpointing"
            )

    def _record_compilation(self, compiled: Compiled) -> None:
        self.metrics |= {"perf/graphs": compiled.graphs, "perf/compile_s": compiled.seconds}
        if compiled.graphs and self.is_early:
            self.say(
                f"step {self.number} compiled {compiled.graphs} graphs in {compiled.seconds:.0f} s; the next run finds "
                f"them in {compiler_cache()}"
            )
        elif compiled.graphs:
            self.say(
                f"warning: step {self.number} compiled {compiled.graphs} more graphs in {compiled.seconds:.0f} s; "
                "graphs fit microbatches of any size, so this is unexpected: report it, or set memory.compile=false"
            )


def _combined(name: str, values: list[float]) -> float:
    return EXTREMES[name](values) if name in EXTREMES else statistics.fmean(values)
