"""Lets generators join a run, leave it and be killed at random moments, until it ends; then its weights must be those
of a run whose own rank generates, bit for bit. With a real vLLM they must be the same but for rounding, for what vLLM
computes depends on what it writes beside.

python -m tests.fleet_chaos [--events 50] [--seed 0] [--vllm .venv-vllm/bin/python]
"""

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from automodel_rl.launch.local import run_local_ranks
from tests.distributed.trainers.runs import Settings, assert_same_weights, metrics_of, settings_of, tensors_of, write
from tests.processes import Job, wait_for_end

MAX_MEMBERS = 3

LONGEST_PAUSE = 0.4
"""Seconds between two events."""


STEPS_OF_EVENT, STEPS_OF_VLLM_EVENT = 3, 16
"""Steps of a run for each event. A vLLM takes longer to start."""

VLLM_ROUNDING = 1e-4
"""Largest difference of weights for which what vLLM rounds is to blame."""


def joined_settings(workspace: Path, output: Path, steps: int, vllm: str | None = None) -> Settings:
    """A run whose generators join it."""
    settings = alone_settings(workspace, output, steps, vllm)
    settings["weight_sync"] = {"publish": str(output.with_name("weights")), "check_every": 0}
    settings["rollout"]["generator"] = {"kind": "joined"}
    return settings


def alone_settings(workspace: Path, output: Path, steps: int, vllm: str | None = None) -> Settings:
    """The same run, whose rank generates, with the vLLM of an interpreter if there is one."""
    settings = settings_of("grpo", workspace, output)
    settings["length"] = {"steps": steps}
    settings["optimizer"]["lr"] = 1e-4  # else all is learned before the end
    settings["checkpoint"] = {"every_steps": 1, "keep_last": 1}
    settings["observe"] = {"samples": 0}
    settings["data"].pop("validation")
    if vllm is not None:
        settings["model"]["dtype"] = "float32"
        settings["rollout"]["generator"] = {"kind": "vllm", "python": vllm}
    return settings


def run_of(settings: Settings, folder: Path, *options: str) -> Job:
    """The run's process."""
    return Job([sys.executable, "-m", "automodel_rl", "grpo", write(settings, folder), *options])


def generator_of(settings: Settings, *options: str) -> Job:
    """The process of a generator that joins the run."""
    folder = settings["weight_sync"]["publish"]
    return Job([sys.executable, "-m", "automodel_rl", "generate", "--join", folder, *options])


class Disturbance:
    """Lets generators come and go. A context manager, which ends those that are left.

    Args:
        settings: the run's config.
        run: its process.
        source: what is random.
        options: of the generators' commands.

    Attributes:
        events: what has happened.
    """

    def __init__(self, settings: Settings, run: Job, source: random.Random, options: Sequence[str] = ()):
        self.settings, self.run, self.source, self.options = settings, run, source, options
        self.events: list[str] = []
        self._there: list[Job] = []
        self._ended = contextlib.ExitStack()

    def __enter__(self) -> "Disturbance":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()

    def happen(self, count: int) -> None:
        """Lets so many events happen, if the run goes on so long, and leaves a generator there."""
        while len(self.events) < count and self.run.process.poll() is None:
            can_join, can_go = len(self._there) < MAX_MEMBERS, bool(self._there)
            choices = [*["join"] * can_join, *["kill", "leave"] * can_go]
            event = self.source.choice(choices)
            self.join() if event == "join" else self._end(event)
            self.events.append(event)
            time.sleep(self.source.uniform(0, LONGEST_PAUSE))
        if not self._there:
            self.join()

    def join(self) -> None:
        """Lets a generator join, and waits until the run says so."""
        before = self.run.stdout.count("has joined")
        job = self._ended.enter_context(generator_of(self.settings, *self.options))
        self._there.append(job)
        self.run.wait_until(lambda: self.run.stdout.count("has joined") > before)

    def _end(self, event: str) -> None:
        before = self.run.stdout.count("has left")
        job = self._there.pop(self.source.randrange(len(self._there)))
        everything = job.processes()
        job.process.send_signal(signal.SIGTERM if event == "leave" else signal.SIGKILL)
        code = job.finish()
        assert code == (0 if event == "leave" else -signal.SIGKILL), job.stdout + job.stderr
        wait_for_end(everything)
        self.run.wait_until(lambda: self.run.stdout.count("has left") > before)


def check_that_nothing_is_lost(
    folder: Path, workspace: Path, alone: Path, count: int, seed: int, vllm: str | None = None
) -> list[str]:
    """Disturbs a run, and compares it with one whose rank generates. What happened."""
    settings = joined_settings(workspace, folder / "run", len(metrics_of(alone)), vllm)
    options = () if vllm is None else ("--vllm", vllm)
    with run_of(settings, folder) as run, Disturbance(settings, run, random.Random(seed), options) as disturbance:
        disturbance.happen(count)
        assert run.finish() == 0, run.stdout + run.stderr
    check_undisturbed(folder / "run", alone, 0.0 if vllm is None else VLLM_ROUNDING)
    return disturbance.events


def check_undisturbed(run: Path, alone: Path, allowed: float = 0.0) -> None:
    """Checks that rewards are those of the run whose rank generates, and weights, too, which may differ by so much."""
    if allowed:
        expected, actual = tensors_of(alone / "final"), tensors_of(run / "final")
        assert expected.keys() == actual.keys()
        assert max(float((actual[name] - expected[name]).abs().max()) for name in expected) <= allowed
    else:
        assert_same_weights(alone / "final", run / "final")
    assert rewards_of(run) == rewards_of(alone)


def rewards_of(output: Path) -> list[float]:
    return [record["rollout/reward_mean"] for record in metrics_of(output) if record["step"]]


def main() -> None:
    from tests.distributed.conftest import make_workspace

    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", help="interpreter of an environment with vLLM")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fleet_chaos_"))
    make_workspace(folder)
    steps = arguments.events * (STEPS_OF_EVENT if arguments.vllm is None else STEPS_OF_VLLM_EVENT)
    command = ["grpo", write(alone_settings(folder, folder / "alone", steps, arguments.vllm), folder)]
    assert run_local_ranks([sys.executable, "-m", "automodel_rl", *command], 1) == 0
    events = check_that_nothing_is_lost(
        folder, folder, folder / "alone", arguments.events, arguments.seed, arguments.vllm
    )
    print(f"{len(events)} events with seed {arguments.seed}: the weights are those of an undisturbed run")


if __name__ == "__main__":
    main()
