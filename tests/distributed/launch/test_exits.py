"""A rank that is done ends with 0, whatever its threads were at: a sample of what `make exits` runs."""

import sys

from tests.processes import run_command


def test_no_rank_aborts_at_its_end() -> None:
    done = run_command([sys.executable, "-m", "tests.exits", "--jobs", "6"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("6 jobs with seed 0, 0 ended badly: {'guard: well': 3, 'interpreter: well': 3}\n")
