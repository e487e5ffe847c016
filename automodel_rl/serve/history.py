"""What the server's page shows over time: queue, throughput and memory, curves of runs, and what was sampled last."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from automodel_rl.rollout.sampled import Refused, Sampled, SamplePrompt
from automodel_rl.serve.messages import Datum

MOST_LOOKS = 1440
"""Most looks at the server that are kept: two hours, with one every five seconds."""

MOST_STEPS = 2000
"""Most optimizer steps of a run that are kept."""

MOST_SAMPLES = 12
"""Most samples that are kept."""


@dataclass
class RunCurve:
    """What is known of a run's optimizer steps.

    Attributes:
        steps: of each step its number, the loss of a token, and the mean advantage; None where data have none.
        num_steps: number of steps so far.
    """

    steps: deque[tuple[int, float | None, float | None]] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    num_steps: int = 0
    _loss: float = 0.0
    _num_tokens: int = 0
    _advantages: list[np.ndarray] = field(default_factory=list)

    def add_pass(self, loss: float, data: Sequence[Datum]) -> None:
        """Notes a forward and backward.

        Args:
            loss: the sum over all tokens.
            data: its data.
        """
        self._loss += loss
        self._num_tokens += sum(map(len, data))
        self._advantages += [datum.inputs["advantages"] for datum in data if "advantages" in datum.inputs]

    def add_step(self) -> None:
        """Notes an optimizer step, and forgets the passes before it."""
        self.num_steps += 1
        loss = self._loss / self._num_tokens if self._num_tokens else None
        advantage = float(np.concatenate(self._advantages).mean()) if self._advantages else None
        self.steps.append((self.num_steps, loss, advantage))
        self._loss, self._num_tokens, self._advantages = 0.0, 0, []


@dataclass(frozen=True)
class ShownSample:
    """A completion that was sampled: when, from which weights, and its tokens."""

    at: float
    weights: str
    prompt: list[int]
    tokens: list[int]


class ServiceHistory:
    """The last hours of a server.

    Attributes:
        looks: of each look the time, jobs that wait, tokens trained and sampled in a second, and rank 0's memory in
            GiB.
        runs: the curves of runs, by their names.
        samples: what was sampled last.
        num_sampled: tokens sampled so far.
    """

    def __init__(self) -> None:
        self.looks: deque[tuple[float, int, float, float, float]] = deque(maxlen=MOST_LOOKS)
        self.runs: dict[str, RunCurve] = {}
        self.samples: deque[ShownSample] = deque(maxlen=MOST_SAMPLES)
        self.num_sampled = 0

    def of_run(self, name: str) -> RunCurve:
        """The curve of a run."""
        return self.runs.setdefault(name, RunCurve())

    def add_samples(self, weights: str, prompts: Sequence[SamplePrompt], answers: Sequence[Sampled | Refused]) -> None:
        """Notes what was sampled.

        Args:
            weights: the name of the weights.
            prompts, answers: the prompts with their answers.
        """
        for prompt, answer in zip(prompts, answers, strict=True):
            if isinstance(answer, Sampled) and answer.sequences:
                self.num_sampled += sum(len(sequence.tokens) for sequence in answer.sequences)
                self.samples.append(ShownSample(time.time(), weights, prompt.tokens, answer.sequences[0].tokens))

    def look(self, num_waiting: int, trained: float, sampled: float, peak_bytes: int) -> None:
        """Notes how the server is."""
        self.looks.append((time.time(), num_waiting, trained, sampled, peak_bytes / 2**30))


def orders_of(orders: Sequence[tuple[Any, float, bool]]) -> list[dict[str, Any]]:
    """Jobs as the page lists them.

    Args:
        orders: of each its job, the seconds that it has waited or run, and whether it runs.
    """
    return [
        {
            "job": job.title,
            "run": next((str(vars(job)[name]) for name in ("run", "kept", "folder") if vars(job).get(name)), ""),
            "seconds": round(seconds, 1),
            "runs": runs,
        }
        for job, seconds, runs in orders
    ]
