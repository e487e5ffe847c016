"""Jobs on a Ray cluster: runs, which are restarted on failure, and the ranks of other commands."""

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray

from automodel_rl.config import RunConfig
from automodel_rl.config.generators import JoinedGeneratorConfig
from automodel_rl.config.launch import RayConfig
from automodel_rl.errors import EXIT_FAILURE, EXIT_OK
from automodel_rl.launch.listener import LOCAL
from automodel_rl.launch.stop_signal import stop_signals
from automodel_rl.observe.run_files import FLIGHTS, RunFiles
from automodel_rl.observe.run_lock import JOB_VARIABLE
from automodel_rl.ray.attempt import RayJob, StopRequests, run_once
from automodel_rl.ray.cluster import connected


def run_on_ray(config: RunConfig, settings: RayConfig, arguments: Sequence[str]) -> int:
    """Runs a job on a Ray cluster, restarting it on failure, and returns its exit code.

    Signals are forwarded to the ranks, so that they save and stop.

    Args:
        settings: the config's `launch.ray`, or its default.
        arguments: the command line after `automodel-rl` that each rank runs.

    Raises:
        InputError: there is no such cluster, or it has too few free nodes.
    """
    os.environ[JOB_VARIABLE] = uuid.uuid4().hex
    with connected(settings.address):
        with _signals() as stop:
            try:
                return _run_until_done(config, settings, [*arguments], stop)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                return EXIT_FAILURE


@contextlib.contextmanager
def _signals() -> Iterator[StopRequests]:
    stop = StopRequests()
    handlers = {number: signal.signal(number, stop.receive) for number in stop_signals()}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class RanksOnRay:
    """Context manager with the ranks of a command other than a run, such as `serve`, on a Ray cluster.

    Args:
        settings: the config's `launch.ray`, or its default.
        arguments: the command line after `automodel-rl` that each rank runs.

    Attributes:
        host: this machine's address for the cluster's nodes.

    Raises:
        InputError: there is no such cluster.
    """

    def __init__(self, settings: RayConfig, arguments: Sequence[str], world_size: int):
        self.settings, self.arguments, self.world_size = settings, arguments, world_size
        self.host = ""
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "RanksOnRay":
        with contextlib.ExitStack() as stack:
            stack.enter_context(connected(self.settings.address))
            self.host = ray.util.get_node_ip_address()
            self._stop = stack.enter_context(_signals())
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def run(self) -> int:
        """Runs the ranks once, forwarding signals, and returns their exit code.

        Raises:
            InputError: the cluster has too few free nodes.
            KeyboardInterrupt: a stop signal arrived while no ranks were running.
        """
        if self._stop.signals:
            raise KeyboardInterrupt
        record = run_once(RayJob(self.world_size), self.settings, self.arguments, self._stop)
        return EXIT_OK if record is None else record.exit_code


def _run_until_done(config: RunConfig, settings: RayConfig, arguments: list[str], stop: StopRequests) -> int:
    failures, reached, began = 0, _newest_checkpoint(config), time.monotonic()
    given, job = arguments, _job_of(config)
    while True:
        record = run_once(job, settings, given, stop)
        if record is None:
            return EXIT_OK
        was_asked = bool(stop.signals) or record.is_everywhere or not record.line.startswith("error: ")
        before, reached = reached, _newest_checkpoint(config)
        failures = 1 if reached != before else failures + 1
        if was_asked or record.exit_code != EXIT_FAILURE or failures > settings.restarts:
            return record.exit_code
        place = reached or "the beginning"
        print(f"restarting from {place}, {failures} of at most {settings.restarts} times ...", flush=True)
        given = _restart_arguments(arguments, bool(reached), (time.monotonic() - began) / 60)


def _newest_checkpoint(config: RunConfig) -> str:
    folders = RunFiles(Path(config.output)).list_checkpoints()
    return folders[-1].name if folders else ""


def _restart_arguments(arguments: list[str], has_checkpoint: bool, minutes: float) -> list[str]:
    """Returns the command line of a restarted run.

    Args:
        has_checkpoint: whether the run has written a checkpoint. Otherwise it resumes from the one it started with,
            if any.
        minutes: time since its first start.
    """
    initial_resume, rest = _take(arguments, "--resume")
    limit, rest = _take(rest, "--max-minutes")
    is_own = has_checkpoint or initial_resume in (None, "auto", "never")
    left = [] if limit is None else ["--max-minutes", f"{max(float(limit) - minutes, 0.1):.2f}"]
    return [*rest, "--resume", "auto" if is_own else str(initial_resume), *left]


def _take(arguments: list[str], name: str) -> tuple[str | None, list[str]]:
    for place, argument in enumerate(arguments):
        if argument == name:
            return arguments[place + 1], arguments[:place] + arguments[place + 2 :]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2], arguments[:place] + arguments[place + 1 :]
    return None, arguments


def _job_of(config: RunConfig) -> RayJob:
    run = config.generation
    flights = Path(config.output).absolute() / FLIGHTS
    if run is None:
        return RayJob(config.world_size, flights=flights)
    generator = run.rollout.generator
    if not isinstance(generator, JoinedGeneratorConfig):
        return RayJob(config.world_size, generator.devices, flights)
    return RayJob(config.world_size, (), flights, run.weight_sync.publish, generator.host in LOCAL)
