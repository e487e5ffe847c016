"""A whole run on a Ray cluster: an agent on each node starts the ranks there, and the driver watches the agents."""

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from automodel_rl.config import RunConfig
from automodel_rl.config.generators import JoinedGeneratorConfig
from automodel_rl.config.launch import RayConfig
from automodel_rl.errors import EXIT_FAILURE, EXIT_OK, InputError
from automodel_rl.launch.flight import last_place, left_flight
from automodel_rl.launch.rank_processes import Ends, NodeShare
from automodel_rl.launch.record import FailureRecord, show
from automodel_rl.launch.stop_signal import stop_signals
from automodel_rl.launch.terminal import Terminal
from automodel_rl.observe.run_directory import STEP_FOLDER, step_of
from automodel_rl.observe.run_files import FLIGHTS, RunFiles
from automodel_rl.observe.run_lock import JOB_VARIABLE
from automodel_rl.ray.cluster import Nodes, connected, environment_for_nodes, reserved
from automodel_rl.ray.joined_generators import JoinedGenerators
from automodel_rl.ray.node_agent import NodeAgent, Place

POLL_SECONDS = 0.1

MOST_SIGNALS = 2
"""Signals that ranks get: the first lets them save, the second interrupts them. One more ends the driver."""

LOST_SECONDS = 60.0
"""Longest wait for the agents when a job has failed. Ray takes some of it to notice that a node is gone."""


def run_on_ray(config: RunConfig, settings: RayConfig, arguments: Sequence[str]) -> int:
    """Runs a job on a Ray cluster, starts it again if it fails, and returns its exit code.

    Signals are passed on to the ranks, so that they save and stop.

    Args:
        config: the run's config.
        settings: its section `launch.ray`, or what stands for it.
        arguments: the command line after `automodel-rl`, which each rank runs again.

    Raises:
        InputError: there is no such cluster, or it has too few nodes free.
    """
    os.environ[JOB_VARIABLE] = uuid.uuid4().hex
    with connected(settings.address):
        stop = _Stop()
        handlers = {number: signal.signal(number, stop.receive) for number in stop_signals()}
        try:
            return _run_until_done(config, settings, [*arguments], stop)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return EXIT_FAILURE
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


class _Stop:
    """Signals that ask to stop. Ranks at work get them; else they end the driver at once.

    Attributes:
        signals: those that have come.
        passed: number of those that ranks have got.
        ranks_work: whether there are ranks that can get them.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.passed, self.ranks_work = 0, False
        self._terminal = Terminal()

    def receive(self, number: int, _: object) -> None:
        self._terminal.outlive()
        self.signals.append(number)
        if not self.ranks_work or len(self.signals) > MOST_SIGNALS:
            raise KeyboardInterrupt

    def take(self) -> list[int]:
        """Those that have come since the last call."""
        fresh = self.signals[self.passed :]
        self.passed += len(fresh)
        return fresh


def _run_until_done(config: RunConfig, settings: RayConfig, arguments: list[str], stop: _Stop) -> int:
    failures, reached, began = 0, _newest_checkpoint(config), time.monotonic()
    given = arguments
    while True:
        record = _attempt(config, settings, given, stop)
        if record is None:
            return EXIT_OK
        was_asked = bool(stop.signals) or record.is_everywhere or not record.line.startswith("error: ")
        before, reached = reached, _newest_checkpoint(config)
        failures = 1 if reached != before else failures + 1
        if was_asked or record.exit_code != EXIT_FAILURE or failures > settings.restarts:
            return record.exit_code
        place = reached or "the beginning"
        print(f"starting again from {place}, {failures} of at most {settings.restarts} times ...", flush=True)
        given = _again(arguments, bool(reached), (time.monotonic() - began) / 60)


def _newest_checkpoint(config: RunConfig) -> str:
    folder = RunFiles(Path(config.output)).checkpoints
    steps = [path for path in folder.glob("step_*") if STEP_FOLDER.fullmatch(path.name)]
    return max(steps, key=step_of).name if steps else ""


def _again(arguments: list[str], has_checkpoint: bool, minutes: float) -> list[str]:
    """The command line of a run that is started again.

    Args:
        arguments: the command line of its first start.
        has_checkpoint: whether it has a checkpoint of its own. Without one it goes on from the checkpoint that it began
            with, if there was one.
        minutes: minutes since its first start.
    """
    began_with, rest = _take(arguments, "--resume")
    limit, rest = _take(rest, "--max-minutes")
    is_own = has_checkpoint or began_with in (None, "auto", "never")
    left = [] if limit is None else ["--max-minutes", f"{max(float(limit) - minutes, 0.1):.2f}"]
    return [*rest, "--resume", "auto" if is_own else str(began_with), *left]


def _take(arguments: list[str], name: str) -> tuple[str | None, list[str]]:
    """The value of an option, and the arguments without it."""
    for place, argument in enumerate(arguments):
        if argument == name:
            return arguments[place + 1], arguments[:place] + arguments[place + 2 :]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2], arguments[:place] + arguments[place + 1 :]
    return None, arguments


def _attempt(config: RunConfig, settings: RayConfig, arguments: Sequence[str], stop: _Stop) -> FailureRecord | None:
    """Runs the job once. Returns why it failed, or None."""
    devices = () if config.generation is None else config.generation.rollout.generator.devices
    with reserved(settings, config.world_size, devices) as nodes, _joined(config, settings) as generators:
        job = _Attempt(nodes, Path(config.output).absolute() / FLIGHTS)
        try:
            job.start(["-m", "automodel_rl", *arguments], config.world_size, is_joined=generators is not None)
            stop.ranks_work = True
            while job.is_at_work:
                time.sleep(POLL_SECONDS)
                job.poll(stop.take())
                if generators is not None:
                    generators.poll()
            if not job.has_failed:
                return None
            ends = job.end()
        finally:
            stop.ranks_work = False
            job.close()
    if ends.is_silent:
        print(ends.tail, end="", file=sys.stderr)
    show(ends.cause)
    return ends.cause


@contextlib.contextmanager
def _joined(config: RunConfig, settings: RayConfig) -> Iterator[JoinedGenerators | None]:
    """The generators that the cluster starts for a run, for the block; None for a run that nobody joins."""
    run = config.generation
    if run is None or not isinstance(run.rollout.generator, JoinedGeneratorConfig):
        yield None
        return
    assert run.weight_sync.publish is not None
    with contextlib.closing(JoinedGenerators(settings, run.weight_sync.publish)) as generators:
        yield generators


class _Attempt:
    """The agents of an attempt."""

    def __init__(self, nodes: Nodes, flights: Path):
        self.nodes, self.flights = nodes, flights
        self.started, self.is_at_work, self.has_failed = time.time(), True, False
        self.agents = {n: ray.remote(NodeAgent).options(**nodes.options(n)).remote() for n in range(nodes.count)}
        self.places: dict[int, Place] = {}
        self.lost: list[Ends] = []

    def start(self, command: Sequence[str], world_size: int, *, is_joined: bool) -> None:
        """Starts the ranks.

        Args:
            command: arguments of Python, which run a rank.
            world_size: number of ranks.
            is_joined: whether generators on other nodes join them, at the first node's address.
        """
        self.places = self._ask(lambda agent, _: agent.place.remote())
        if self.lost:
            self.is_at_work, self.has_failed = False, True
            return
        per_node, first = self.nodes.ranks_per_node, self.places[0]
        hosts = ", ".join(place.host for place in self.places.values())
        print(f"starting {world_size} ranks, {per_node} on each of {self.nodes.count} nodes ({hosts}) ...", flush=True)
        if is_joined:
            command = [*command, f"--rollout.generator.host={first.address}"]
        shared = (environment_for_nodes(), str(Path.cwd()), self.flights)
        refusals = self._ask(
            lambda agent, node: agent.start.remote(
                command, NodeShare(node * per_node, per_node, world_size, first.address, first.port), *shared
            )
        )
        for node, refusal in refusals.items():
            if refusal:
                raise InputError(f"node {self.places[node].host}: {refusal}")

    def poll(self, signals: Sequence[int]) -> None:
        """Shows what rank 0 has printed, passes signals on, and sees whether ranks have ended."""
        codes = self._show(signals)
        self.has_failed = bool(self.lost) or EXIT_FAILURE in codes
        self.is_at_work = not self.has_failed and any(code is None for code in codes)

    def _show(self, signals: Sequence[int] = ()) -> list[int | None]:
        """Prints what is new of rank 0's output. Returns what is known of each node's exit codes."""
        progress = self._ask(lambda agent, _: agent.progress.remote(signals))
        for one in progress.values():
            sys.stdout.buffer.write(one.output)
        sys.stdout.flush()
        return [one.exit_code for one in progress.values()]

    def end(self) -> Ends:
        """Ends all ranks. A node that does not say how its ranks ended is lost."""
        ended = self._ask(lambda agent, _: agent.end.remote(), LOST_SECONDS)
        self._show()
        found = [*ended.values(), *self.lost]
        found.sort(key=lambda ends: ends.noticed)
        silent = [ends for ends in found if ends.silent]
        return Ends(
            [record for ends in found for record in ends.records],
            [record for ends in silent for record in ends.silent],
            silent[0].tail if silent else "",
            bool(silent) and silent[0].was_killed,
            found[0].noticed,
        )

    def close(self) -> None:
        self._ask(lambda agent, _: agent.close.remote(), LOST_SECONDS)

    def _ask(self, question: Callable[[Any, int], Any], seconds: float | None = None) -> dict[int, Any]:
        """The answers of the agents by node. Those that are gone, or do not answer in time, are lost."""
        asked = {question(agent, node): node for node, agent in self.agents.items()}
        answers, waiting = {}, [*asked]
        deadline = None if seconds is None else time.monotonic() + seconds
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, waiting = ray.wait(waiting, timeout=left)
            for future in done or waiting:
                node = asked[future]
                try:
                    answers[node] = ray.get(future, timeout=0)
                except (RayError, TimeoutError) as error:
                    self._lose(node, error)
            if not done:
                break
        return dict(sorted(answers.items()))

    def _lose(self, node: int, error: Exception) -> None:
        del self.agents[node]
        first = node * self.nodes.ranks_per_node
        last = first + self.nodes.ranks_per_node - 1
        place = self.places.get(node, Place("a node", "", 0))
        file = left_flight(self.flights, first, self.started)
        record = FailureRecord(
            first,
            EXIT_FAILURE,
            f"error: {place.host}, with ranks {first} to {last}, is gone: Ray has lost the node or its agent",
            where="" if file is None else last_place(file),
            host=place.host,
            pid=0,
            flight=str(file or ""),
        )
        self.lost.append(Ends([], [record], f"{' '.join(str(error).split())[:400]}\n", True, time.time()))
