"""The clock of peers that train with transformers' trainer: time of every step, and what it logs of the first."""

import time
from typing import Any

from rows import synchronize
from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Times steps, with the device synchronised at their edges.

    Attributes:
        seconds: time of every step.
        first: what the trainer logs of the first step, such as `loss` and `grad_norm`.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.first: dict[str, Any] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize()
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize()
        self.seconds.append(time.perf_counter() - self.started)
        control.should_log = state.global_step == 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs and not self.first:
            self.first = dict(logs)
