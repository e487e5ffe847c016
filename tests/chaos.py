"""Kills runs at random moments and goes on with them, until they end; then their weights must be those of a run that
nobody disturbed, bit for bit.

python -m tests.chaos [--kills 50] [--seed 0]
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from automodel_rl.launch.local import run_local_ranks
from tests.distributed.trainers.runs import Settings, assert_same_weights, metrics_of, num_lines, settings_of, write
from tests.processes import Job, children_of, wait_for_end

MOMENTS = ("starting", "training", "saving")
TARGETS = ("one rank", "all ranks", "launcher")

POLL_SECONDS = 0.002
"""Seconds between two looks at a run, short because moments are."""

STEPS = {"sft": 60, "dpo": 40, "grpo": 25}


@dataclass(frozen=True)
class Kill:
    """A kill: when it happens, and what is killed.

    Attributes:
        moment: one of `MOMENTS`.
        target: one of `TARGETS`.
        delay: seconds from the moment on.
        steps: number of training steps to wait for first.
    """

    moment: str
    target: str
    delay: float
    steps: int

    def __str__(self) -> str:
        return f"{self.target} while {self.moment}"


def draw_kill(source: random.Random) -> Kill:
    """A random kill. Kills while starting are rare, because they take longest and are of least interest."""
    moment = source.choices(MOMENTS, weights=(1, 4, 5))[0]
    longest = {"starting": 12.0, "training": 0.2, "saving": 0.03}[moment]
    return Kill(moment, source.choice(TARGETS), source.uniform(0, longest), source.randint(1, 4))


def chaos_settings(algorithm: str, workspace: Path, output: Path) -> Settings:
    """A run over two pipeline ranks that checkpoints at every step."""
    changes: Settings = {"parallel": {"pp": 2}, "checkpoint": {"every_steps": 1, "keep_last": 2}}
    settings = settings_of(algorithm, workspace, output, **changes)
    settings["length"] = {"steps": STEPS[algorithm]}
    settings["model"]["dtype"] = "float32"
    settings["observe"] = {"samples": 0}
    settings["data"].pop("validation")
    return settings


def kill_part(job: Job, target: str, source: random.Random) -> None:
    """Kills what is to be killed of a job, and waits until nothing is left of it."""
    everything, ranks = job.processes(), children_of(job.process.pid)
    if target == "launcher" or not ranks:
        victims = [job.process.pid]
    else:
        victims = ranks if target == "all ranks" else [source.choice(ranks)]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.finish()
    wait_for_end(everything)


def disturb(algorithm: str, settings: Settings, folder: Path, kill: Kill, source: random.Random) -> bool:
    """Starts a run or goes on with it, and kills it. Returns whether it was still there to be killed."""
    output = Path(settings["output"])
    command = [sys.executable, "-m", "automodel_rl", algorithm, write(settings, folder), "--resume", "auto"]
    before = num_lines(output / "metrics.jsonl")
    with Job(command) as job:
        if kill.moment != "starting":
            written = job.wait_until(lambda: num_lines(output / "metrics.jsonl") >= before + kill.steps, POLL_SECONDS)
            if written and kill.moment == "saving":
                job.wait_until(lambda: any((output / "checkpoints").glob(".step_*.unfinished")), POLL_SECONDS)
        time.sleep(kill.delay)
        was_there = job.process.poll() is None
        kill_part(job, kill.target, source)
        assert was_there or job.process.returncode == 0, job.stdout + job.stderr
        return was_there


def check_undisturbed(settings: Settings, whole: Path) -> None:
    """Checks that the run's weights and steps are those of the run that nobody disturbed."""
    output = Path(settings["output"])
    assert_same_weights(whole / "final", output / "final")
    records, expected = metrics_of(output), metrics_of(whole)
    assert [record["step"] for record in records] == [record["step"] for record in expected]
    assert [record["train/loss"] for record in records] == [record["train/loss"] for record in expected]


def _run(algorithm: str, settings: Settings, folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "automodel_rl", algorithm, write(settings, folder), *options]
    assert run_local_ranks(command, 2) == 0


def main() -> None:
    from tests.distributed.conftest import make_workspace

    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    make_workspace(folder)
    runs = {}
    for algorithm in STEPS:
        (folder / algorithm).mkdir()
        runs[algorithm] = chaos_settings(algorithm, folder, folder / algorithm / "run")
        whole = runs[algorithm] | {"output": str(folder / algorithm / "whole")}
        _run(algorithm, whole, folder / algorithm)
    kills = 0
    while kills < arguments.kills:
        algorithm = [*STEPS][kills % len(STEPS)]
        kill = draw_kill(source)
        if disturb(algorithm, runs[algorithm], folder / algorithm, kill, source):
            kills += 1
            done = num_lines(folder / algorithm / "run" / "metrics.jsonl")
            print(f"kill {kills}: {algorithm}, {kill}; {done} of {STEPS[algorithm]} steps", flush=True)
            continue
        runs[algorithm] = _next_run(algorithm, runs[algorithm], folder)
    for algorithm, settings in runs.items():
        _run(algorithm, settings, folder / algorithm, "--resume", "auto")
        check_undisturbed(settings, folder / algorithm / "whole")
    print(f"{kills} kills with seed {arguments.seed}: the weights of every run are those of an undisturbed one")


def _next_run(algorithm: str, settings: Settings, folder: Path) -> Settings:
    """Checks a run that has ended, and the one after it."""
    check_undisturbed(settings, folder / algorithm / "whole")
    print(f"a run of {algorithm} has ended with the weights of the undisturbed one", flush=True)
    return settings | {"output": f"{settings['output']}_again"}


if __name__ == "__main__":
    main()
