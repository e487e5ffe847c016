"""The rank's end of a fleet: passes requests of the program to its generator, and completions back."""

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from automodel_rl.batch import RouterShape, Routes, RoutesRef, read_routes
from automodel_rl.errors import describe_root_cause
from automodel_rl.generator_messages import Finished, Generate, GenerateFailed, Request
from automodel_rl.generators.protocol import Completion, KeptRoutes, RankGenerator
from automodel_rl.generators.rank_listener import connect_to_program
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.launch.listener import ListenerAddress
from automodel_rl.policy.routes import RouteStore


class Relay:
    """Passes requests of the program to this rank's generator, and each completion back as it is written.

    A thread receives requests for a generator that works alone. Others get theirs by remote calls of
    `FleetRank.write`.

    Args:
        supervisor: the supervisor of the rank's generator.
        routes: stores the routes of completions.
        address: the program's listener for ranks.

    Raises:
        InputError: the program cannot be reached.
    """

    def __init__(self, rank: int, supervisor: GeneratorSupervisor, routes: RouteStore, address: ListenerAddress):
        self.rank, self.supervisor, self.routes = rank, supervisor, routes
        self._send_lock, self._keys = threading.Lock(), itertools.count()
        self._connection = connect_to_program(address, rank)
        threading.Thread(target=self._take_requests, daemon=True, name="requests").start()

    def write(self, requests: Sequence[Generate]) -> None:
        """Writes completions with a generator in this process."""
        generator = self.supervisor.generator
        for asked in requests:
            self._begin(asked)
        if generator is not None:
            generator.write()

    def close(self) -> None:
        """Closes the connection to the program."""
        self._connection.shutdown()

    def _take_requests(self) -> None:
        """Receives requests until either side closes the connection. It also closes, and so informs the program, if
        this thread fails."""
        with self._connection, contextlib.suppress(EOFError, OSError):
            while True:
                self._begin(self._connection.recv())

    def _begin(self, asked: Generate) -> None:
        """Submits requests to the generator. Their completions are sent to the program as they arrive."""
        generator = self.supervisor.generator
        if generator is None or self.supervisor.problem:
            self._report_lost(asked, generator, self.supervisor.problem or "it is not running")
            return
        try:
            completions = generator.submit(asked.requests)
        except Exception as error:
            self._report_lost(asked, generator, describe_root_cause(error))
            return
        for index, completion in enumerate(completions):
            completion.add_done_callback(functools.partial(self._finish, asked, index, generator))

    def _finish(self, asked: Generate, index: int, generator: RankGenerator, done: "Future[Completion]") -> None:
        try:
            completion = self._checked(done.result(), asked.requests[index])
        except Exception as error:
            self._report_lost(asked, generator, describe_root_cause(error))
        else:
            self._send(Finished(asked.number, index, completion))

    def _report_lost(self, asked: Generate, generator: RankGenerator | None, problem: str) -> None:
        """Reports a lost generator to the supervisor and the program."""
        self.supervisor.mark_lost(generator, problem)
        self._send(GenerateFailed(asked.number, problem))

    def _send(self, message: Finished | GenerateFailed) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # the program has ended
            self._connection.send(message)

    def _checked(self, completion: Completion, request: Request) -> Completion:
        """Returns the completion with policy versions, and references to the routes, which stay here. It is an error if
        the completion is invalid, as from a server with another model, or its routes are."""
        handle = self.supervisor.handle
        completion = completion.checked(request, handle.config.vocab_size)
        kept = None
        if request.rollouts is not None and handle.router_shape is not None and completion.finish != "error":
            try:
                kept = [self._keep(completion, request, request.rollouts, handle.router_shape)]
            except Exception as problem:
                return Completion([], [], "error", f"its routes are invalid: {describe_root_cause(problem)}")
        versions = None if completion.versions is None else self.supervisor.policy_versions(completion.versions)
        return dataclasses.replace(completion, versions=versions, routes=kept, writer=self.rank)

    def _keep(self, completion: Completion, request: Request, rollouts: int, shape: RouterShape) -> KeptRoutes:
        """Stores the routes of a completion and its prompt."""
        routes, start = read_routes(completion.routes, len(request.prompt), len(completion.token_ids), shape), 0
        missing = routes.missing()
        if request.routes_from:  # a copy, so that the rest can be freed
            start = request.routes_from
            routes = Routes(routes.layers, routes.experts[start:].clone())
        key = rollouts, next(self._keys)
        self.routes.keep(key, start, routes)
        return KeptRoutes(RoutesRef(self.rank, key, start, start + len(routes)), missing[start:])
