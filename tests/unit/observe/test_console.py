"""The lines of a run on the console."""

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


def test_slow_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    said: list[str] = []
    work = SlowWork(said.append, "writing 2 samples", "at most 9 tokens")
    for done in range(1, 9):
        now[0] += 2.0
        work.note(done)
    assert said == ["writing 2 samples: 3 of at most 9 tokens", "writing 2 samples: 6 of at most 9 tokens"]
