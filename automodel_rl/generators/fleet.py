"""Fleet: the generators of a policy, as a program uses them."""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.errors import RolloutError
from automodel_rl.generator_messages import Failed, Finished, Request
from automodel_rl.generators import jobs
from automodel_rl.generators.meeting import Meeting
from automodel_rl.generators.member import Member
from automodel_rl.generators.protocol import Completion, OnFinished, do_nothing
from automodel_rl.launch.flight import flight
from automodel_rl.policy.crew import Crew
from automodel_rl.policy.jobs import Job

T = TypeVar("T")

LOOK_SECONDS = 10.0
"""Seconds between two looks whether all ranks are there, while a program waits for completions."""


@dataclass(eq=False)
class _Order:
    """The requests of one `submit`.

    Attributes:
        requests, on_finished: what `submit` got.
        only: the member that is to write them; None for any.
        done: completions by place.
        problem: why nobody writes those that are missing, "" if somebody does.
        error: what `on_finished` raised.
    """

    requests: Sequence[Request]
    on_finished: OnFinished
    only: Member | None = None
    done: dict[int, Completion] = field(default_factory=dict)
    problem: str = ""
    error: BaseException | None = None

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for."""
        return len(self.done) == len(self.requests) or bool(self.problem) or self.error is not None


@dataclass(eq=False)
class _Part:
    """The part of an order that a member writes: its places, of which so many are not done."""

    order: _Order
    places: list[int]
    member: Member
    left: int


class Fleet:
    """The generators of a policy. A program calls its methods; nothing in it is a collective.

    Each generator is a member, led by a rank. What a member that is lost was to write goes to others, with the same
    seeds; `restart` brings it back. The turns of a conversation go to one member, which has their beginning cached.

    Args:
        crew: the ranks, which lead the generators.

    Attributes:
        members: the generators, by rank; there once they are started.
        policy_version: the policy version that generators got last, or get when they wake, from 1 on.
        warning: a line about memory that generators cannot use although the trainer lends it; empty if there is none.

    Example:
        >>> def program(policy, fleet, run):
        ...     policy.begin()
        ...     fleet.start(run.config.generator_spec)
        ...     fleet.sync()
        ...     return fleet.policy_version
        >>> run_program(program, load_config("my_grpo.yaml"))  # doctest: +ELLIPSIS
        loading ...
        1
    """

    def __init__(self, crew: Crew):
        self.crew = crew
        self.members: list[Member] = []
        self.policy_version = 0
        self.warning = ""
        self.spec: GeneratorSpec
        self._news = threading.Condition()
        self._numbers = itertools.count(1)
        self._parts: dict[int, _Part] = {}

    @property
    def works_alone(self) -> bool:
        """Whether generators write while ranks do something else. If not, they write when waited for."""
        return all(member.works_alone for member in self.members)

    @property
    def can_write(self) -> bool:
        """Whether a member is there."""
        return any(not member.problem for member in self.members)

    @property
    def lost(self) -> dict[int, str]:
        """Why members are lost, by rank."""
        return {member.rank: member.problem for member in self.members if member.problem}

    def start(self, spec: GeneratorSpec) -> None:
        """Starts all generators.

        Args:
            spec: the generator that each rank asks for.

        Raises:
            InputError: a generator does not start.
        """
        self.spec = spec
        with Meeting(self.crew.host) as meeting:
            led: list[tuple[int, bool]] = self.crew.ask(jobs.StartGenerators(spec, meeting.address))
            self.members = [Member(rank, alone, meeting.connection(rank), self._take) for rank, alone in led]

    def sync(self) -> None:
        """Gives all generators the weights that the policy has now, as the next policy version. Those that sleep get
        them when they wake."""
        self.policy_version += 1
        self._note(self.crew.ask(jobs.SyncWeights(is_new=True)))

    def sync_again(self) -> None:
        """Gives all generators the weights that the policy has now, as the same policy version as before."""
        self._note(self.crew.ask(jobs.SyncWeights(is_new=False)))

    @contextlib.contextmanager
    def awake(self, time: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()) -> Iterator[None]:
        """Lets generators write in this block, in the memory that they share with the trainer, if they do. After it
        the trainer's weights may still be on the host.

        Args:
            time: a block that measures how long the phase with this name takes.
        """
        if not self.spec.shares_memory:
            yield
            return
        try:
            with time("wake"):
                self._note(self.crew.ask(jobs.Wake()))
            yield
        finally:
            if self.crew.is_intact:
                with time("sleep"):
                    self.warning = self.crew.ask(jobs.Sleep())[0]

    def restore(self) -> None:
        """Brings the trainer's weights back, if they are on the host."""
        if self.spec.shares_memory:
            self.crew.ask(jobs.Restore())

    def submit(
        self, requests: Sequence[Request], on_finished: OnFinished = do_nothing
    ) -> Callable[[], list[Completion]]:
        """Lets generators begin to write. Any thread may call it.

        Args:
            requests: the completions to write, which are dealt to the members.
            on_finished: called for every completion, by another thread.

        Returns:
            A function that waits for the completions, in the order of the requests. If generators do not work alone,
            the program's own thread must call it. It raises RolloutError if all members are lost.
        """
        return functools.partial(self._completions, self._begin(_Order(requests, on_finished)))

    def waited(self, wait: Callable[[], T]) -> T:
        """What a function returns that waits for completions. Meanwhile this looks whether all ranks are there.

        Args:
            wait: the function.
        """
        if not self.works_alone:
            return wait()
        result: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                result.append(wait())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True, name="waiting")
        thread.start()
        thread.join(LOOK_SECONDS)
        while thread.is_alive():
            with flight.phase("asking whether all ranks are there"):
                self.crew.ask(Job())
            thread.join(LOOK_SECONDS)
        if errors:
            raise errors[0]
        return result[0]

    def write(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions by the generators, with the weights of the last `sync`.

        Args:
            requests: the completions to write, which are dealt to the generators.

        Raises:
            RolloutError: a generator cannot write.
        """
        try:
            with self.awake():
                completions = self.waited(self.submit(requests))
        finally:
            if self.crew.is_intact:
                self.restore()
        self._raise_if_lost()
        return completions

    def write_alike(self, requests: Sequence[Request]) -> dict[int, list[Completion]]:
        """The same completions by every generator, by the rank that leads it; none by one that is lost.

        Args:
            requests: the completions to write.
        """
        orders = [self._begin(_Order(requests, do_nothing, member)) for member in self.members]

        def wait() -> None:
            for order in orders:
                with contextlib.suppress(RolloutError):
                    self._completions(order)

        self.waited(wait)
        of_members = zip(self.members, orders, strict=True)
        return {m.rank: [o.done[place] for place in range(len(requests))] for m, o in of_members if not o.problem}

    def lose(self, rank: int, problem: str) -> None:
        """Holds a generator for lost: it gets no requests until `restart`.

        Args:
            rank: the rank that leads it.
            problem: why.
        """
        with self._news:
            self._lose(next(member for member in self.members if member.rank == rank), problem)

    def restart(self) -> None:
        """Starts generators again that are lost. All get the weights that the policy has now, as the same policy
        version as before. One that does not start is lost again."""
        answers: list[tuple[int, str]] = self.crew.ask(jobs.RestartGenerators(self.lost))
        with self._news:
            for member in self.members:
                member.problem = ""
        self._note(answers)

    def close(self) -> None:
        """Ends all generators."""
        self.crew.ask(jobs.CloseGenerators())
        for member in self.members:
            member.close()

    def _raise_if_lost(self) -> None:
        for rank, problem in self.lost.items():
            raise RolloutError(f"the generator of rank {rank} cannot write: {problem}")

    def _note(self, problems: Iterable[tuple[int, str]]) -> None:
        """Learns from ranks that their generators are lost."""
        lost = dict(problems)
        with self._news:
            for member in self.members:
                if member.rank in lost:
                    self._lose(member, lost[member.rank])

    def _begin(self, order: _Order) -> _Order:
        with self._news:
            self._deal(order, range(len(order.requests)))
        return order

    def _deal(self, order: _Order, places: Sequence[int]) -> None:
        """Gives members requests in turn, or by their conversations."""
        candidates = self.members if order.only is None else [order.only]
        well = [member for member in candidates if not member.problem]
        if places and not well:
            order.problem = f"the generator of rank {candidates[0].rank} cannot write: {candidates[0].problem}"
            return
        shares: dict[Member, list[int]] = {}
        for turn, place in enumerate(places):
            conversation = order.requests[place].conversation
            shares.setdefault(well[(turn if conversation is None else conversation) % len(well)], []).append(place)
        for member, own in shares.items():
            number = next(self._numbers)
            self._parts[number] = _Part(order, own, member, len(own))
            member.ask(number, [order.requests[place] for place in own])

    def _completions(self, order: _Order) -> list[Completion]:
        """Waits for the completions of an order. Those of members that do not work alone are written now."""
        while queued := {member.rank: member.take_queued() for member in self.members if member.queued}:
            self.crew.ask(jobs.Write(queued))
            numbers = {one.number for of_member in queued.values() for one in of_member}
            with self._news:  # what they have written may still be on its way
                self._news.wait_for(lambda numbers=numbers: not numbers & self._parts.keys())  # type: ignore[misc]
        with self._news:
            self._news.wait_for(lambda: order.is_settled)
        if order.error is not None:
            raise order.error
        if order.problem:
            raise RolloutError(order.problem)
        return [order.done[place] for place in range(len(order.requests))]

    def _take(self, member: Member, message: Finished | Failed) -> None:
        """Takes what a member sends. Its thread calls it."""
        if isinstance(message, Failed):
            with self._news:
                if not message.number or message.number in self._parts:  # else it was lost before
                    self._lose(member, message.text)
            return
        part = self._parts.get(message.number)
        if part is None:
            return
        order, place = part.order, part.places[message.place]
        try:
            order.on_finished(place, message.written)
        except BaseException as error:
            order.error = error
        with self._news:
            order.done[place] = message.written
            part.left -= 1
            if not part.left:
                self._parts.pop(message.number, None)
            self._news.notify_all()

    def _lose(self, member: Member, problem: str) -> None:
        """Lets others write what a member was to write."""
        member.problem = member.problem or problem
        member.queued.clear()
        for number, part in [*self._parts.items()]:
            if part.member is member:
                del self._parts[number]
                self._deal(part.order, [place for place in part.places if place not in part.order.done])
        self._news.notify_all()
