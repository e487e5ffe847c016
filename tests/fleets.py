"""Fleets without ranks: relays with generators of the tests, in this process."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from automodel_rl.batch import RouterShape
from automodel_rl.generator_messages import Request
from automodel_rl.generators import jobs
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.protocol import Completion, OnFinished, do_nothing
from automodel_rl.generators.relay import Relay
from automodel_rl.policy.jobs import Job

VOCABULARY = 100


class Echo:
    """A generator that writes each prompt's last token and its seed. It writes nothing while it is `held`, and is lost
    once `lose` is called.

    Attributes:
        asked: the requests that it got.
    """

    works_alone = True

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.held, self._lost = threading.Event(), threading.Event()
        self.held.set()

    def lose(self) -> None:
        """Lets it be lost with what it is writing."""
        self._lost.set()
        self.held.set()

    def submit(
        self, requests: Sequence[Request], on_finished: OnFinished = do_nothing
    ) -> Callable[[], list[Completion]]:
        self.asked += requests
        return lambda: self._write(requests, on_finished)

    def _write(self, requests: Sequence[Request], on_finished: OnFinished) -> list[Completion]:
        self.held.wait()
        if self._lost.is_set():
            raise ConnectionError("it is gone")
        written = [self.completion(request) for request in requests]
        for place, completion in enumerate(written):
            on_finished(place, completion)
        return written

    def completion(self, request: Request) -> Completion:
        """What it writes."""
        return Completion([request.prompt[-1], request.seed % VOCABULARY], [0.0, 0.0], "stop", versions=(3, 3))


class Waiting(Echo):
    """A generator that writes when waited for."""

    works_alone = False


class LocalCrew:
    """Does jobs of a fleet with generators of this process, each of which a rank leads.

    Args:
        generators: the generators, by rank.
        shape: the shape of routes, if they have some.
    """

    def __init__(self, generators: dict[int, Any], shape: RouterShape | None = None):
        handle = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY), router_shape=shape)
        self.supervisors: dict[int, Any] = {
            rank: SimpleNamespace(
                generator=generator, problem="", handle=handle, policy_versions=lambda pair: (pair[0] - 2, pair[1] - 2)
            )
            for rank, generator in generators.items()
        }
        self.routes = {rank: SimpleNamespace(own={}) for rank in generators}
        self.relays: dict[int, Relay] = {}
        self.host, self.is_intact, self.signals = "localhost", True, list[str]()
        self.restarted: list[dict[int, str]] = []
        self.num_looks = 0

    def ask(self, job: Job, shares: Sequence[Any] = ()) -> list[Any]:
        match job:
            case jobs.StartGenerators(_, address):
                for rank, supervisor in self.supervisors.items():
                    routes: Any = self.routes[rank]
                    self.relays[rank] = Relay(rank, supervisor, routes, address)
                return [(rank, one.generator.works_alone) for rank, one in self.supervisors.items()]
            case jobs.Write(orders):
                for rank, of_rank in orders.items():
                    self.relays[rank].write(of_rank)
            case jobs.RestartGenerators(lost):
                self.restarted.append(lost)
                for rank in lost:
                    self.supervisors[rank].problem = ""
                    self.supervisors[rank].generator = type(self.supervisors[rank].generator)()
            case _:
                self.num_looks += 1
        return []

    def close(self) -> None:
        """Ends the relays."""
        for relay in self.relays.values():
            relay.close()


def fleet_of(crew: LocalCrew) -> Fleet:
    """The fleet of a crew's generators, which are started."""
    fleet, spec = Fleet(crew), SimpleNamespace(shares_memory=False)
    fleet.start(spec)  # type: ignore[arg-type]
    return fleet
