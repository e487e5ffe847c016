"""How the watchdog tells a rank that waits for its peers from one that hangs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_rl.launch import watchdog
from automodel_rl.step import runner
from automodel_rl.trainers import sft


def frame_in(file: str) -> Any:
    return SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_back=None)


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        (runner.__file__, True),
        (torch.__file__, True),
        (watchdog.__file__, True),
        (sft.__file__, False),
        ("/somewhere/rewards.py", False),
    ],
)
def test_a_rank_waits_where_collectives_are(file: str, waits: bool) -> None:
    assert watchdog._waits(frame_in(file)) is waits


def test_rooms_of_own_work_exist() -> None:
    assert all(Path(room).is_dir() for room in watchdog.OWN_WORK)
