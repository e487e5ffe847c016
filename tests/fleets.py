"""Fleets without ranks: relays with generators of the tests, in this process."""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from automodel_rl.batch import RouterShape
from automodel_rl.generator_messages import Request
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.protocol import Completion, RankGenerator, fail_unfinished
from automodel_rl.generators.relay import Relay
from automodel_rl.policy.crew import Crew, RemoteCall
from automodel_rl.policy.routes import RouteStore

VOCABULARY = 100


class Echo(RankGenerator):
    """A generator that writes each prompt's last token and its seed. It writes nothing while it is `held`, and is lost
    once `lose` is called.

    Attributes:
        asked: the requests that it got.
    """

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.submitted: list[tuple[Sequence[Request], list[Future[Completion]]]] = []
        self.held, self._lost = threading.Event(), threading.Event()
        self.held.set()

    def lose(self) -> None:
        """Lets it be lost with what it is writing."""
        self._lost.set()
        self.held.set()

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        self.asked += requests
        completions: list[Future[Completion]] = [Future() for _ in requests]
        if self.writes_in_background:
            threading.Thread(target=self._write, args=(requests, completions), daemon=True).start()
        else:
            self.submitted.append((requests, completions))
        return completions

    def write(self) -> None:
        while self.submitted:
            self._write(*self.submitted.pop(0))

    def _write(self, requests: Sequence[Request], completions: "Sequence[Future[Completion]]") -> None:
        try:
            self.complete(requests, lambda place, completion: completions[place].set_result(completion))
        except Exception as error:
            fail_unfinished(completions, error)

    def close(self) -> None: ...

    def complete(self, requests: Sequence[Request], finish: Callable[[int, Completion], None]) -> None:
        """Writes completions, and tells of each."""
        self.held.wait()
        if self._lost.is_set():
            raise ConnectionError("it is gone")
        written = [self.completion(request) for request in requests]
        for place, completion in enumerate(written):
            finish(place, completion)

    def completion(self, request: Request) -> Completion:
        """What it writes."""
        return Completion([request.prompt[-1], request.seed % VOCABULARY], [0.0, 0.0], "stop", versions=(3, 3))


class Waiting(Echo):
    """A generator that writes when waited for."""

    writes_in_background = False


class LocalCrew(Crew):
    """Answers the calls of a fleet with generators of this process, each of which a rank leads.

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
        for supervisor in self.supervisors.values():
            supervisor.mark_lost = functools.partial(_lose, supervisor)
        self.routes = {rank: RouteStore(handle) for rank in generators}  # type: ignore[arg-type]
        self.relays: dict[int, Relay] = {}
        self.host, self.is_intact, self.signals = "localhost", True, []
        self.restarted: list[dict[int, str]] = []
        self.num_looks = 0

    def call(self, call: RemoteCall, shares: Sequence[Any]) -> dict[int, Any]:
        match call.method, call.arguments:
            case "start", (_, address):
                for rank, supervisor in self.supervisors.items():
                    self.relays[rank] = Relay(rank, supervisor, self.routes[rank], address)
                return {rank: (rank, one.generator.writes_in_background) for rank, one in self.supervisors.items()}
            case "write", (requests,):
                for rank, of_rank in requests.items():
                    self.relays[rank].write(of_rank)
            case "restart", (lost, _):
                self.restarted.append(lost)
                for rank in lost:
                    self.supervisors[rank].problem = ""
                    self.supervisors[rank].generator = type(self.supervisors[rank].generator)()
            case _:
                self.num_looks += 1
        return {}

    def close(self) -> None:
        """Ends the relays."""
        for relay in self.relays.values():
            relay.close()


def _lose(supervisor: Any, generator: Any, problem: str) -> None:
    if generator is supervisor.generator:
        supervisor.problem = supervisor.problem or problem


def fleet_of(crew: LocalCrew) -> Fleet:
    """The fleet of a crew's generators, which are started."""
    fleet, spec = Fleet(crew), SimpleNamespace(shares_memory=False, choice=None)
    fleet.start(spec)  # type: ignore[arg-type]
    return fleet
