"""A rank that fails in the middle of a step ends the whole job soon, and the last lines say what happened where."""

import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.launch.failing_job import SLEEP_SECONDS
from tests.processes import Job, run_command, wait_for_end
from tests.tiny import save_tiny_model

IN_LOSS = "loss of microbatch 2 on stage 1"

OURS = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("launcher", "way", "rank", "place", "last_line"),
    [
        (OURS, "loss", 1, IN_LOSS, f"error: rank 1: {IN_LOSS} failed: ValueError: planted in the loss"),
        (
            OURS,
            "memory",
            1,
            IN_LOSS,
            f"error: rank 1: {IN_LOSS} failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        (OURS, "abort", 0, "", "error: rank 0: ValueError: the real cause"),
        (OURS, "killed", 1, IN_LOSS, "error: rank 1 was killed by SIGKILL; the machine may have run out of memory"),
        (OURS, "hang", 1, IN_LOSS, "error: rank 1 hangs: "),
        (TORCHRUN, "loss", 1, IN_LOSS, f"error: rank 1: {IN_LOSS} failed: ValueError: planted in the loss"),
    ],
)
def test_the_job_ends_soon_and_one_block_names_rank_host_phase_and_cause(
    tmp_path: Path, launcher: list[str], way: str, rank: int, place: str, last_line: str
) -> None:
    check_block(tmp_path, launcher, way, rank, place, last_line)


def check_block(tmp_path: Path, launcher: list[str], way: str, rank: int, place: str, last_line: str) -> None:
    """Lets a job fail and looks at what it shows.

    Args:
        tmp_path: for the job's files.
        launcher: that starts it.
        way: in which it fails.
        rank: that fails first.
        place: where it is then.
        last_line: how that of the block begins.
    """
    save_tiny_model(tmp_path / "model", dtype=torch.float32)
    job = run_command([*launcher, "-m", "tests.distributed.launch.failing_job", str(tmp_path / "model"), way])
    ended = time.time()
    assert job.returncode == 1
    assert ended - float((tmp_path / "model" / "failed_at").read_text()) < SLEEP_SECONDS / 10
    if launcher is TORCHRUN and way == "killed":  # torchrun ends the others at once and says what it saw
        assert "Signal 9 (SIGKILL)" in job.stderr
        return
    lines = job.stderr.splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith("the job failed")]
    (end,) = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    facts = dict(line.strip().split(maxsplit=1) for line in lines[start + 1 : end])
    assert facts["rank"] == str(rank)
    assert facts["host"].startswith(f"{socket.gethostname()} (process ")
    assert facts.get("while", "").endswith(place)
    assert lines[end].startswith(last_line)
    if launcher is OURS:
        assert job.stderr.strip().splitlines()[-1].startswith(last_line)
    flights = {path.name for path in (tmp_path / "model" / "flight").glob("*.log")}
    assert flights == {"rank_0.log", "rank_1.log"}


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", dtype=torch.float32)
    command = [sys.executable, "-m", "tests.distributed.launch.failing_job", str(tmp_path / "model"), "sleep"]
    pids = tmp_path / "model" / "pids"
    with Job(command) as job:
        assert job.wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2), job.stderr
        job.process.kill()
        wait_for_end(map(int, pids.read_text().split()))
