"""Jobs of two ranks that end once they are done, in both manners: no rank may end with anything but 0, or abort.

python -m tests.exits [--jobs 200] [--seed 0]

All is imported once. Every rank is a fork of this process, which has neither threads nor groups. Without
`renew_thread_pool` about 1 job in 22 aborted (16 cores, torch 2.11 for CUDA); elsewhere it is rare.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from automodel_rl import Engine, ModelConfig, ModelHandle, OptimizerConfig, ParallelConfig, pack, sft_loss
from automodel_rl.launch import watchdog
from automodel_rl.launch.failure import guard
from automodel_rl.launch.forks import renew_thread_pool
from automodel_rl.launch.local import free_port
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries
from tests.processes import Patience
from tests.tiny import make_sequences, save_tiny_model

MANNERS = ("interpreter", "guard")
"""The ways to end: as a user's script does, and as a command does."""

WORKS = ("groups of a model", "world", "world, destroyed by the caller")

POLLS = (watchdog.POLL_SECONDS, 0.0005)
"""Seconds between two looks of a rank at its peers. With the second value, most ranks end in the middle of a look."""

ABORT = "terminate called"

kept: list[Any] = []
"""Objects that a user's script still holds at its end."""


@dataclass(frozen=True)
class Job:
    """A job of two ranks.

    Attributes:
        manner: the way in which they end, one of `MANNERS`.
        work: the work before, one of `WORKS`.
        poll_seconds: one of `POLLS`.
        keeps: whether the model lives until the end.
        delays: seconds until each rank ends.
    """

    manner: str
    work: str
    poll_seconds: float
    keeps: bool
    delays: tuple[float, float]

    def __str__(self) -> str:
        return f"{self.manner}, {self.work}, poll {self.poll_seconds:g} s, delays {self.delays}, keeps {self.keeps}"


def draw_job(number: int, source: random.Random) -> Job:
    """Manners take turns."""
    first, second = (source.choice((0.0, 0.0, source.uniform(0, 1.2))) for _ in range(2))
    work, poll = source.choice(WORKS), source.choice(POLLS)
    return Job(MANNERS[number % 2], work, poll, source.random() < 0.5, (round(first, 2), round(second, 2)))


def do(job: Job, model: Path) -> None:
    """The work of a rank."""
    watchdog.POLL_SECONDS = job.poll_seconds
    if job.work == "groups of a model":
        config = ModelConfig(path=str(model), dtype="float32")
        handle = ModelHandle.from_pretrained(config, ParallelConfig(dp_shard=2))
        engine = Engine(handle, OptimizerConfig(decay="constant"))
        sequences = make_sequences(4, seed=0)
        engine.train_step(pack(sequences, 64, share=handle.layout.data_share), sft_loss)
        if job.keeps:
            kept.append(engine)
    else:
        join_process_group(2)
        dist.all_reduce(torch.ones(1))
    time.sleep(job.delays[dist.get_rank()])
    if job.work == "world, destroyed by the caller":
        dist.destroy_process_group()


def fork_rank(job: Job, model: Path, rank: int, port: int, said: Path) -> int:
    """Starts a rank and returns its process. The rank itself leaves by SystemExit, as any script does."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    renew_thread_pool()
    with said.open("wb") as file:
        os.dup2(file.fileno(), 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="localhost")
    if job.manner == "guard":
        sys.exit(guard(lambda: do(job, model)))
    do(job, model)
    sys.exit(0)


def run_job(job: Job, model: Path, folder: Path) -> list[str]:
    """What went wrong, for each rank that did not end well."""
    port = free_port()
    files = [folder / f"rank_{rank}" for rank in range(2)]
    ranks = [fork_rank(job, model, rank, port, file) for rank, file in enumerate(files)]
    codes = _codes_of(ranks)
    texts = [file.read_text(errors="replace") for file in files]
    return [
        f"rank {rank} ended with {code}: {job}\n{text[-2000:]}"
        for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
        if code != 0 or ABORT in text
    ]


def _codes_of(processes: list[int]) -> list[int]:
    """Exit codes, those of signals negative; what has come to a halt is killed."""
    codes: dict[int, int] = {}
    patience = Patience(lambda: processes)
    while len(codes) < len(processes):
        for process in set(processes) - codes.keys():
            if patience.is_over:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[process] for process in processes]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="exits_"))
    save_tiny_model(folder / "model", num_layers=2, dtype=torch.float32)
    source = random.Random(arguments.seed)
    ended: Counter[str] = Counter()
    for number in range(arguments.jobs):
        job = draw_job(number, source)
        problems = run_job(job, folder / "model", folder)
        ended[f"{job.manner}: {'badly' if problems else 'well'}"] += 1
        for problem in problems:
            print(f"job {number}, {problem}", flush=True)
    bad = sum(count for name, count in ended.items() if name.endswith("badly"))
    print(f"{arguments.jobs} jobs with seed {arguments.seed}, {bad} ended badly: {dict(sorted(ended.items()))}")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
