"""The lines of a run on the console."""

import io
import re
from typing import Any

import pytest

from automodel_rl.observe import console
from automodel_rl.observe.console import Progress, SlowWork


@pytest.mark.parametrize(
    ("skipped", "nothing", "said"),
    [
        (0, 0, []),
        (1, 1, ["skipped: no trained token"]),
        (1, 0, ["skipped: not finite"]),
        (2, 1, ["skipped: not finite", "skipped: no trained token"]),
    ],
)
def test_a_skipped_step_says_why(skipped: int, nothing: int, said: list[str], capsys: Any) -> None:
    record = {"step": 3, "train/loss": 0.5, "train/skipped": skipped, "train/nothing_to_train": nothing}
    Progress(9, 0).show(record)
    assert [part for part in capsys.readouterr().out.strip().split("  ") if "skipped" in part] == said


def test_steps_stay_on_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.sys, "stdout", screen := io.StringIO())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # is taken for a terminal
    numbers = dict.fromkeys(console.COLUMNS, 0.123456) | {"train/loss": -0.00001, "val/loss": 1234.5}
    with Progress(200, 0) as progress:
        progress.phase("measuring the untrained model")
        for step in (1, 2):
            progress.show({"step": step, **numbers})
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip("\r") for line in screen.getvalue().split("\n")]
    assert "measuring the untrained model" in lines
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/200", "2/200"]
    assert all(len(line) <= 80 and "  loss 0.0000  " in line and "val loss 1234.5000" in line for line in steps)


def test_slow_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    said: list[str] = []
    work = SlowWork(said.append, "writing 2 samples", "at most 9 tokens")
    for done in range(1, 9):
        now[0] += 2.0
        work.note(done)
    assert said == ["writing 2 samples: 3 of at most 9 tokens", "writing 2 samples: 6 of at most 9 tokens"]
