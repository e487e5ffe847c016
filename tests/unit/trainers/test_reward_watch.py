"""Runs end after steps in a row from which nothing can be learned."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_rl.errors import RolloutError
from automodel_rl.trainers.step_rollouts import MAX_STEPS, RewardWatch

EQUAL: Any = SimpleNamespace(has_signal=False)
UNLIKE: Any = SimpleNamespace(has_signal=True)


def test_steps_without_signal_count_in_a_row_and_over_a_resume(tmp_path: Path) -> None:
    watch = RewardWatch(tmp_path)
    for groups in ([[EQUAL, EQUAL]] * (MAX_STEPS - 1), [[EQUAL, UNLIKE]], [[EQUAL]] * (MAX_STEPS - 1)):
        for of_step in groups:
            watch.look_at(of_step)
    again = RewardWatch(tmp_path)
    again.load_state_dict(watch.state_dict())
    for one in (watch, again):
        with pytest.raises(RolloutError, match=f"in {MAX_STEPS} consecutive steps no prompt had completions with diff"):
            one.look_at([EQUAL])
