"""A rank that fails in the middle of a step ends the whole job soon, and the last lines say what happened where."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.tiny import save_tiny_model


@pytest.mark.parametrize(
    ("way", "last_line"),
    [
        ("loss", "error: rank 1: loss of microbatch 2 on stage 1 failed: ValueError: planted in the loss"),
        ("forward", "error: rank 0: forward of microbatch 0 on stage 0 failed: ValueError: planted in attention"),
        ("abort", "error: rank 0: ValueError: the real cause"),
        ("killed", "error: rank 1 was ended by SIGKILL; the machine may have run out of memory"),
    ],
)
def test_the_job_ends_and_names_rank_stage_microbatch_and_cause(tmp_path: Path, way: str, last_line: str) -> None:
    save_tiny_model(tmp_path / "model", dtype=torch.float32)
    job = subprocess.run(
        [sys.executable, "-m", "tests.distributed.launch.failing_job", str(tmp_path / "model"), way],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    ended = time.time()
    assert job.returncode == 1
    assert job.stderr.strip().splitlines()[-1] == last_line
    assert ended - float((tmp_path / "model" / "failed_at").read_text()) < 30


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", dtype=torch.float32)
    command = [sys.executable, "-m", "tests.distributed.launch.failing_job", str(tmp_path / "model"), "sleep"]
    job = subprocess.Popen(command, start_new_session=True)
    pids = tmp_path / "model" / "pids"
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job.kill()
    job.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
