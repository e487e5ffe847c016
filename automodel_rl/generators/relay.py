"""The rank's end of a fleet: it passes a program's requests to this rank's generator, and completions back."""

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from automodel_rl.batch import RouterShape, Routes, RoutesAt, read_routes
from automodel_rl.errors import RolloutError, innermost
from automodel_rl.generator_messages import Failed, Finished, Generate, Request
from automodel_rl.generators.meeting import meet
from automodel_rl.generators.protocol import Completion, KeptRoutes, RankGenerator
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.launch.door import DoorAddress
from automodel_rl.policy.routes import RouteStore


class Relay:
    """Passes requests of a program to this rank's generator. Completions go back one by one, as they are written.

    A thread takes the requests, and lets a generator that works alone begin at once. Another one gets its requests by a
    remote call of `FleetRank.write`.

    Args:
        rank: this rank.
        supervisor: the supervisor of its generator.
        routes: keeps the routes of completions.
        address: where the program waits.

    Raises:
        InputError: the program cannot be reached.
    """

    def __init__(self, rank: int, supervisor: GeneratorSupervisor, routes: RouteStore, address: DoorAddress):
        self.rank, self.supervisor, self.routes = rank, supervisor, routes
        self._sending, self._keys = threading.Lock(), itertools.count()
        self._connection = meet(address, rank)
        threading.Thread(target=self._take_requests, daemon=True, name="requests").start()

    def write(self, requests: Sequence[Generate]) -> None:
        """Writes completions, by a generator that shares this process.

        Args:
            requests: the requests.
        """
        generator = self.supervisor.generator
        for asked in requests:
            self._begin(asked)
        if generator is not None:
            generator.write()

    def close(self) -> None:
        """Takes no more requests."""
        self._connection.hang_up()

    def _take_requests(self) -> None:
        """Takes requests until the program has ended, or this rank. If this thread fails, the program learns of it."""
        with self._connection, contextlib.suppress(EOFError, OSError):
            while True:
                self._begin(self._connection.recv())

    def _begin(self, asked: Generate) -> None:
        """Gives the generator requests, whose completions go to the program as they come."""
        generator = self.supervisor.generator
        try:
            if generator is None or self.supervisor.problem:
                raise RolloutError(self.supervisor.problem or "it is not there")
            completions = generator.submit(asked.requests)
        except Exception as error:
            self._lose(asked, generator, error)
            return
        for place, completion in enumerate(completions):
            completion.add_done_callback(functools.partial(self._finish, asked, place, generator))

    def _finish(self, asked: Generate, place: int, generator: RankGenerator, done: "Future[Completion]") -> None:
        try:
            completion = self._checked(done.result(), asked.requests[place])
        except Exception as error:
            self._lose(asked, generator, error)
        else:
            self._send(Finished(asked.number, place, completion))

    def _lose(self, asked: Generate, generator: RankGenerator | None, error: Exception) -> None:
        """Tells the supervisor and the program that a generator is lost."""
        problem = str(error) if isinstance(error, RolloutError) else innermost(error)
        self.supervisor.lose(generator, problem)
        self._send(Failed(asked.number, problem))

    def _send(self, message: Finished | Failed) -> None:
        with self._sending, contextlib.suppress(OSError):  # the program has ended
            self._connection.send(message)

    def _checked(self, completion: Completion, request: Request) -> Completion:
        """The completion as a program gets it: with policy versions, and without the routes, which stay here. It is an
        error if it does not answer the request, as from a server with another model, or has routes that cannot be
        followed."""
        handle = self.supervisor.handle
        completion = completion.checked(request, handle.config.vocab_size)
        kept = None
        if request.rollouts is not None and handle.router_shape is not None and completion.finish != "error":
            try:
                kept = [self._keep(completion, request, request.rollouts, handle.router_shape)]
            except Exception as problem:
                return Completion([], [], "error", f"its routes cannot be followed: {innermost(problem)}")
        versions = None if completion.versions is None else self.supervisor.policy_versions(completion.versions)
        return dataclasses.replace(completion, versions=versions, routes=kept, writer=self.rank)

    def _keep(self, completion: Completion, request: Request, rollouts: int, shape: RouterShape) -> KeptRoutes:
        """Keeps the routes of a completion and its prompt here."""
        routes, start = read_routes(completion.routes, len(request.prompt), len(completion.token_ids), shape), 0
        missing = routes.missing()
        if request.routes_from:  # a copy: else all would stay
            start = request.routes_from
            routes = Routes(routes.layers, routes.experts[start:].clone())
        key = rollouts, next(self._keys)
        self.routes.keep(key, start, routes)
        return KeptRoutes(RoutesAt(self.rank, key, start, start + len(routes)), missing[start:])
