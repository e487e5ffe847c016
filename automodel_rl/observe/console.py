"""Progress of a run: a live line on a terminal, one plain line per step elsewhere."""

import contextlib
import datetime
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from automodel_rl.observe.metrics import MEASURED

COLUMNS = {
    "train/loss": "loss {:.4f}",
    "train/accuracy": "accuracy {:.1%}",
    "rollout/reward_mean": "reward {:.3f}",
    "rollout/completion_tokens_mean": "length {:.0f}",
    "train/kl_ref": "KL {:.4f}",
    "train/grad_norm": "grad norm {:.3f}",
    "perf/tokens_per_second": "{:,.0f} tokens/s",
    "perf/mfu": "MFU {:.1%}",
    "val/loss": "val loss {:.4f}",
    "val/accuracy": "val accuracy {:.1%}",
    "val/reward_mean": "val reward {:.3f}",
}
"""Metrics on the progress line, if the step has them, with their formats."""

DISPENSABLE = (
    "perf/mfu",
    "perf/tokens_per_second",
    "train/grad_norm",
    "rollout/completion_tokens_mean",
    "train/kl_ref",
)
"""Metrics that a narrow terminal does not show, the first to go first."""


SECONDS_BETWEEN_LINES = 5.0
"""Seconds between progress lines about work without steps."""


class Progress:
    """Context manager that shows the steps, a line each, and on a terminal what the run is doing below them.
    `first_step` is the number of steps done before this run."""

    def __init__(self, total_steps: int, first_step: int):
        self.total_steps, self.first_step = total_steps, first_step
        self.console = Console(file=cast(TextIO, _Outlived(sys.stdout)))
        self.started = time.monotonic()
        self.live = Live(console=self.console, refresh_per_second=8) if self.console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.update("")
            self.live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def phase(self, text: str) -> None:
        """Shows what the run is doing until the next step."""
        self.say(text)
        self._show_bar(self.first_step, text)

    def show(self, record: dict[str, Any]) -> None:
        """Prints a step. On a terminal, numbers that do not fit into a line are left out, the least important first."""
        step, numbers = record["step"], _numbers(record)
        head, eta = f"step {step}/{self.total_steps}", f"eta {self._eta(step)}"
        while self.live and len(numbers) > 1 and len("  ".join([head, *numbers.values()])) > self.console.width:
            del numbers[
                next(name for name in DISPENSABLE if name in numbers)
                if {*DISPENSABLE} & numbers.keys()
                else [*numbers][-1]
            ]
        if self.live is None:
            print("  ".join([head, *numbers.values(), eta]), file=self.console.file, flush=True)
            return
        self.say("  ".join([head, *numbers.values()]))
        self._show_bar(step, eta)

    def _show_bar(self, step: int, text: str) -> None:
        if self.live:
            grid = Table.grid(padding=(0, 1))
            grid.add_row(
                ProgressBar(total=self.total_steps, completed=step, width=24), f"{step}/{self.total_steps}", text
            )
            self.live.update(grid)

    def _eta(self, step: int) -> str:
        elapsed = time.monotonic() - self.started
        seconds = elapsed / max(1, step - self.first_step) * (self.total_steps - step)
        return str(datetime.timedelta(seconds=round(seconds)))


class SlowWork:
    """Progress lines for work without steps, every few seconds; none for quick work.

    Args:
        say: prints a line.
        what: start of the line: the work.
        total: end of the line: the amount of work, with its unit.
    """

    def __init__(self, say: Callable[[str], None], what: str, total: str):
        self._say, self._what, self._total = say, what, total
        self._said = time.monotonic()

    def note(self, done: int) -> None:
        """Records the amount done, and prints a line if one is due."""
        now = time.monotonic()
        if now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            self._say(f"{self._what}: {done} of {self._total}")


class _Outlived:
    """Standard output with errors ignored, so that the run continues when its terminal is closed."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _numbers(record: dict[str, Any]) -> dict[str, str]:
    """Returns the texts of a step's line, by metric."""
    shown = {key: _text(template, record[key]) for key, template in COLUMNS.items() if record.get(key) is not None}
    if record.get(MEASURED, record["step"]) != record["step"]:
        shown[MEASURED] = f"(validation of step {record[MEASURED]})"
    nothing = record.get("train/nothing_to_train", 0)
    if record.get("train/skipped", 0) > nothing:
        shown["train/skipped"] = "skipped: not finite"
    if nothing:
        shown["train/nothing_to_train"] = "skipped: no trained token"
    return shown


def _text(template: str, value: float) -> str:
    """Formats a number, without the sign of a negative one that is rounded to zero."""
    text = template.format(value)
    return text.replace("-", "") if value < 0 and not any(digit in text for digit in "123456789") else text
