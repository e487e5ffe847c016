"""One attempt at a job on a Ray cluster: an agent on each node starts ranks there, and the driver polls the agents."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from automodel_rl.config.launch import RayConfig
from automodel_rl.errors import EXIT_FAILURE, InputError
from automodel_rl.launch.flight import last_phase, left_flight
from automodel_rl.launch.rank_processes import NodeShare, RankFailures
from automodel_rl.launch.record import FailureRecord, show
from automodel_rl.launch.stop_signal import Terminal
from automodel_rl.ray.cluster import Nodes, environment_for_nodes, reserved
from automodel_rl.ray.joined_generators import JoinedGenerators
from automodel_rl.ray.node_agent import NodeAgent, NodeLocation

POLL_SECONDS = 0.1

MAX_SIGNALS = 2
"""Signals forwarded to ranks: the first makes them save, the second interrupts them. A further one ends the driver."""

LOST_SECONDS = 60.0
"""Longest wait for the agents after a job has failed. Ray needs some of it to detect a lost node."""


@dataclass(frozen=True)
class RayJob:
    """A job's demands on a cluster.

    Attributes:
        devices: GPUs of each node that are reserved for generators, numbered after those of the ranks.
        flights: folder of the ranks' flight recorder files; None for none.
        published: folder of published weights, for generators that join the run; None without such generators.
        needs_host: whether generators join at the first node's address because the config names none.
    """

    world_size: int
    devices: Sequence[int] = ()
    flights: Path | None = None
    published: Path | None = None
    needs_host: bool = False


class StopRequests:
    """Stop signals. They are forwarded to running ranks; without any, they end the driver at once.

    Attributes:
        signals: all signals received.
        passed: number of signals already forwarded.
        ranks_work: whether ranks are running.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.passed, self.ranks_work = 0, False
        self._terminal = Terminal()

    def receive(self, number: int, _: object) -> None:
        self._terminal.discard_output_if_closed()
        self.signals.append(number)
        if not self.ranks_work or len(self.signals) > MAX_SIGNALS:
            raise KeyboardInterrupt

    def take(self) -> list[int]:
        fresh = self.signals[self.passed :]
        self.passed += len(fresh)
        return fresh


def run_once(job: RayJob, settings: RayConfig, arguments: Sequence[str], stop: StopRequests) -> FailureRecord | None:
    """Runs a job once on the connected cluster. Returns the cause of a failure, which has been printed, or None.

    Args:
        arguments: the command line after `automodel-rl` that each rank runs.
        stop: signals to forward to the ranks.

    Raises:
        InputError: the cluster has too few free nodes, or a node cannot start ranks.
    """
    with reserved(settings, job.world_size, job.devices) as nodes, _joined(job, settings) as generators:
        attempt = _Attempt(nodes, job.flights)
        try:
            attempt.start(["-m", "automodel_rl", *arguments], job.world_size, needs_host=job.needs_host)
            stop.ranks_work = True
            while attempt.is_at_work:
                time.sleep(POLL_SECONDS)
                attempt.poll(stop.take())
                if generators is not None:
                    generators.poll()
            if not attempt.has_failed:
                return None
            ends = attempt.end()
        finally:
            stop.ranks_work = False
            attempt.close()
    if ends.is_silent:
        print(ends.tail, end="", file=sys.stderr)
    show(ends.cause)
    return ends.cause


@contextlib.contextmanager
def _joined(job: RayJob, settings: RayConfig) -> Iterator[JoinedGenerators | None]:
    """Yields the generators that the cluster starts for a run; None if there are none."""
    if job.published is None:
        yield None
        return
    with contextlib.closing(JoinedGenerators(settings, job.published)) as generators:
        yield generators


class _Attempt:
    """The agents of one attempt."""

    def __init__(self, nodes: Nodes, flights: Path | None):
        self.nodes, self.flights = nodes, flights
        self.started, self.is_at_work, self.has_failed = time.time(), True, False
        self.agents = {n: ray.remote(NodeAgent).options(**nodes.options(n)).remote() for n in range(nodes.count)}
        self.locations: dict[int, NodeLocation] = {}
        self.lost: list[RankFailures] = []

    def start(self, command: Sequence[str], world_size: int, *, needs_host: bool) -> None:
        """Starts the ranks.

        Args:
            command: Python arguments that run a rank.
            needs_host: whether generators on other nodes join at the first node's address.
        """
        self.locations = self._ask(lambda agent, _: agent.location.remote())
        if self.lost:
            self.is_at_work, self.has_failed = False, True
            return
        per_node, first = self.nodes.ranks_per_node, self.locations[0]
        hosts = ", ".join(location.host for location in self.locations.values())
        print(f"starting {world_size} ranks, {per_node} on each of {self.nodes.count} nodes ({hosts}) ...", flush=True)
        if needs_host:
            command = [*command, f"--rollout.generator.host={first.address}"]
        shared = (environment_for_nodes(), str(Path.cwd()), self.flights)
        refusals = self._ask(
            lambda agent, node: agent.start.remote(
                command, NodeShare(node * per_node, per_node, world_size, first.address, first.port), *shared
            )
        )
        for node, refusal in refusals.items():
            if refusal:
                raise InputError(f"node {self.locations[node].host}: {refusal}")

    def poll(self, signals: Sequence[int]) -> None:
        """Prints rank 0's new output, forwards signals, and checks whether ranks have ended."""
        codes = self._show(signals)
        self.has_failed = bool(self.lost) or EXIT_FAILURE in codes
        self.is_at_work = not self.has_failed and any(code is None for code in codes)

    def _show(self, signals: Sequence[int] = ()) -> list[int | None]:
        """Prints rank 0's new output. Returns the exit codes known for each node."""
        progress = self._ask(lambda agent, _: agent.progress.remote(signals))
        for one in progress.values():
            sys.stdout.buffer.write(one.output)
        sys.stdout.flush()
        return [one.exit_code for one in progress.values()]

    def end(self) -> RankFailures:
        """Ends all ranks. A node that does not report how its ranks ended counts as lost."""
        ended = self._ask(lambda agent, _: agent.end.remote(), LOST_SECONDS)
        self._show()
        found = [*ended.values(), *self.lost]
        found.sort(key=lambda ends: ends.noticed)
        silent = [ends for ends in found if ends.silent]
        return RankFailures(
            [record for ends in found for record in ends.records],
            [record for ends in silent for record in ends.silent],
            silent[0].tail if silent else "",
            bool(silent) and silent[0].was_killed,
            found[0].noticed,
        )

    def close(self) -> None:
        self._ask(lambda agent, _: agent.close.remote(), LOST_SECONDS)

    def _ask(self, question: Callable[[Any, int], Any], seconds: float | None = None) -> dict[int, Any]:
        """Calls every agent and returns the answers by node. Agents that are gone or too slow count as lost."""
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
                    self._mark_lost(node, error)
            if not done:
                break
        return dict(sorted(answers.items()))

    def _mark_lost(self, node: int, error: Exception) -> None:
        del self.agents[node]
        first = node * self.nodes.ranks_per_node
        last = first + self.nodes.ranks_per_node - 1
        location = self.locations.get(node, NodeLocation("a node", "", 0))
        file = left_flight(self.flights, first, self.started)
        record = FailureRecord(
            first,
            EXIT_FAILURE,
            f"error: {location.host}, with ranks {first} to {last}, was lost: Ray cannot reach the node or its agent",
            where="" if file is None else last_phase(file),
            host=location.host,
            pid=0,
            flight=str(file or ""),
        )
        self.lost.append(RankFailures([], [record], f"{' '.join(str(error).split())[:400]}\n", True, time.time()))
