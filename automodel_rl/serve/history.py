"""History shown on the server's page: queue, throughput and memory, runs' curves, and recent samples."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from automodel_rl.rollout.sampled import Refused, Sampled, SamplePrompt
from automodel_rl.serve.messages import Datum

MAX_SNAPSHOTS = 1440
"""Snapshots kept: two hours at one every five seconds."""

MAX_STEPS = 2000
"""Optimizer steps kept per run."""

MAX_SAMPLES = 12
"""Samples kept."""


@dataclass
class RunCurve:
    """History of a run's optimizer steps.

    Attributes:
        steps: (step, loss per trained token, their mean advantage); None where the data have none.
        num_steps: steps so far, including those no longer kept.
    """

    steps: deque[tuple[int, float | None, float | None]] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    num_steps: int = 0
    _loss: float = 0.0
    _num_tokens: int = 0
    _advantages: list[np.ndarray] = field(default_factory=list)

    def add_pass(self, loss: float, data: Sequence[Datum]) -> int:
        """Records a forward-backward, and returns the number of trained tokens. `loss` is the sum over them."""
        trained = [datum.trained for datum in data]
        num_tokens = sum(int(mask.sum()) for mask in trained)
        self._loss += loss
        self._num_tokens += num_tokens
        pairs = zip(data, trained, strict=True)
        self._advantages += [d.inputs["advantages"][mask] for d, mask in pairs if "advantages" in d.inputs]
        return num_tokens

    def add_step(self) -> None:
        """Records an optimizer step, which completes the passes before it."""
        self.num_steps += 1
        loss = self._loss / self._num_tokens if self._num_tokens else None
        advantages = np.concatenate(self._advantages) if self._advantages else np.zeros(0)
        advantage = float(advantages.mean()) if len(advantages) else None
        self.steps.append((self.num_steps, loss, advantage))
        self._loss, self._num_tokens, self._advantages = 0.0, 0, []


@dataclass(frozen=True)
class ShownSample:
    """A sampled completion, its time, and the name of its weights."""

    at: float
    weights: str
    prompt: list[int]
    tokens: list[int]


class ServiceHistory:
    """Recent history of a server.

    Attributes:
        snapshots: snapshots: time, waiting jobs, tokens trained and sampled per second, and rank 0's memory in GiB.
        num_sampled: tokens sampled so far.
    """

    def __init__(self) -> None:
        self.snapshots: deque[tuple[float, int, float, float, float]] = deque(maxlen=MAX_SNAPSHOTS)
        self.runs: dict[str, RunCurve] = {}
        self.samples: deque[ShownSample] = deque(maxlen=MAX_SAMPLES)
        self.num_sampled = 0

    def of_run(self, name: str) -> RunCurve:
        return self.runs.setdefault(name, RunCurve())

    def add_samples(self, weights: str, prompts: Sequence[SamplePrompt], answers: Sequence[Sampled | Refused]) -> None:
        for prompt, answer in zip(prompts, answers, strict=True):
            if isinstance(answer, Sampled) and answer.sequences:
                self.num_sampled += sum(len(sequence.tokens) for sequence in answer.sequences)
                self.samples.append(ShownSample(time.time(), weights, prompt.tokens, answer.sequences[0].tokens))

    def record_snapshot(self, num_waiting: int, trained: float, sampled: float, peak_bytes: int) -> None:
        self.snapshots.append((time.time(), num_waiting, trained, sampled, peak_bytes / 2**30))


def orders_of(orders: Sequence[tuple[Any, float, bool]]) -> list[dict[str, Any]]:
    """Formats jobs for the page. An order is a job, the seconds it has waited or run, and whether it is running."""
    return [
        {
            "job": job.title,
            "run": next((str(vars(job)[name]) for name in ("run", "kept", "folder") if vars(job).get(name)), ""),
            "seconds": round(seconds, 1),
            "runs": runs,
        }
        for job, seconds, runs in orders
    ]
