"""What a rank of a large job makes and sends does not grow with the job."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found() -> dict[int, Any]:
    command = [sys.executable, "-m", "benchmarks.scale", "64", "1024"]
    output = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {row["ranks"]: row for row in rows}


def test_a_rank_is_in_as_many_groups_of_any_job(found: dict[int, Any]) -> None:
    assert [row["groups"] for row in found.values()] == [10, 10]


def test_control_of_a_step_takes_a_logarithm_of_messages(found: dict[int, Any]) -> None:
    """Three sums over all ranks go up and down a tree, and no collective goes around a ring of them."""
    for size, row in found.items():
        of_all = {kind: count for kind, count in row["collectives_of_a_step"].items() if kind.startswith(f"{size} ")}
        assert of_all == {f"{size} recv": 3 * (size.bit_length() - 1), f"{size} broadcast": 3}
