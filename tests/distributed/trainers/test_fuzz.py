"""Broken configs and data either train or end with one line: a sample of what `make fuzz` runs."""

from pathlib import Path

from tests.fuzz import fuzz


def test_broken_input_trains_or_is_refused_in_one_line(workspace: Path) -> None:
    counts, failures = fuzz(range(5000, 5050), seed=0, workspace=workspace, num_workers=1)
    assert not failures, "\n".join(failures)
    assert counts["trained"] >= 3
    assert counts["refused"] >= 12
