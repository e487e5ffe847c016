"""Fleet: a program's interface to the generators of a policy."""

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import JoinedGeneratorConfig
from automodel_rl.errors import InputError, RolloutError, StoppedError
from automodel_rl.generator_messages import Finished, GenerateFailed, ProtocolError, Request, UseVersion
from automodel_rl.generators.joined_members import JoinedMembers, JoinService
from automodel_rl.generators.joining_messages import Leaving, MessageConnection, ReadingWeights
from automodel_rl.generators.member import Member, name_of
from automodel_rl.generators.pending_requests import Assignment, PendingRequest, divide
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.rank_listener import RankListener
from automodel_rl.launch import watchdog
from automodel_rl.launch.background import in_thread
from automodel_rl.launch.flight import flight
from automodel_rl.policy.crew import FLEET, POLICY, Crew

T = TypeVar("T")

HEALTH_CHECK_SECONDS = 30.0
"""Seconds between health checks of ranks and members while a program waits for completions."""

STOP_SECONDS = 1.0
"""Seconds between checks for a stop signal while a program waits for completions."""


class Fleet:
    """The generators of a policy. The program calls its methods; none is a collective.

    A member is one generator, either led by a rank or joined from outside the job (generators/joining.py). Unfinished
    requests of a lost member are reassigned with the same seeds; a request that has lost too many members becomes a
    completion with an error. `restart` restarts generators of ranks. Joined generators may come and go; requests wait
    while there is none. All turns of a conversation go to one member, which has the prefix cached.

    Args:
        crew: the ranks, which lead the generators.

    Attributes:
        members: filled by `start`, and as generators join.
        evaluators: joined generators that only evaluate; None if the run has none.
        needed: oldest published version that evaluators still read, which is not deleted; None if there is none.
        policy_version: version of the last weight sync, counted from 1. Sleeping generators load it when they wake.
        warning: one line about offloaded trainer memory that generators cannot use; empty if there is none.

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
        self.evaluators: Fleet | None = None
        self.needed: int | None = None
        self.policy_version = 0
        self.warning = ""
        self.spec: GeneratorSpec
        self._condition = threading.Condition()  # guards the attributes below, all members and submissions
        self._numbers = itertools.count(1)
        self._assignments: dict[int, Assignment] = {}
        self._held: list[PendingRequest] | None = None
        self._member_of_conversation: dict[int, Member] = {}  # which member has a conversation's prefix cached
        self._joined: JoinedMembers | None = None
        self._join_service: JoinService | None = None

    @property
    def writes_in_background(self) -> bool:
        """Whether generators write in the background. If not, they write only inside `wait`."""
        return all(member.writes_in_background for member in self.members)

    @property
    def can_write(self) -> bool:
        """Whether a member is available or may still join."""
        may_join = self._joined is not None and not self._joined.has_timed_out
        return may_join or any(not member.problem for member in self.members)

    @property
    def lost(self) -> dict[int, str]:
        """Reasons by rank, of the lost members that `restart` restarts."""
        return {one.number: one.problem for one in self.members if one.problem and not self._is_postponed(one)}

    @property
    def postponed(self) -> dict[int, str]:
        """Reasons by rank, of the members that did not restart and are not retried before a later policy version."""
        return {one.number: one.problem for one in self.members if one.problem and self._is_postponed(one)}

    def name_of(self, number: int | None) -> str:
        """Returns the name of a member for messages, also of a lost one. `number` is None for generators outside a
        fleet."""
        return name_of(number, has_joined=self._joined is not None)

    def start(self, spec: GeneratorSpec) -> None:
        """Starts the generators that `spec` describes, or waits until enough have joined.

        Raises:
            InputError: a generator does not start, or too few join.
        """
        self.spec = spec
        with RankListener(self.crew.host) as listener:
            led: list[tuple[int, bool]] = self.crew.gather(FLEET, "start", spec, listener.address)
            self.members = [Member(rank, alone, listener.connection(rank), self._handle_message) for rank, alone in led]
        if isinstance(spec.choice, JoinedGeneratorConfig):
            self._let_join(spec, spec.choice)

    def sync(self) -> None:
        """Syncs the policy's current weights to all generators as the next policy version. Sleeping generators load
        them when they wake."""
        self.policy_version += 1
        self.sync_again()

    def sync_again(self) -> None:
        """Syncs the policy's current weights to all generators without a new policy version."""
        self._note(self.crew.gather(FLEET, "sync_weights", self.policy_version, self.needed))
        self._member_of_conversation.clear()  # their caches are of other weights
        if self._joined is not None:
            self._tell_version(self._joined)

    @contextlib.contextmanager
    def awake(self, timed: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()) -> Iterator[None]:
        """Allows generators to write inside the block. Generators that share memory with the trainer hold it there, and
        the trainer's weights may still be in host memory afterwards.

        Args:
            timed: returns a context manager that times the phase of the given name.
        """
        if not self.spec.shares_memory:
            yield
            return
        try:
            with timed("wake"):
                self._note(self.crew.gather(FLEET, "wake"))
                if self.lost:
                    self.restart()
            yield
        finally:
            if self.crew.is_intact:
                with timed("sleep"):
                    self.warning = self.crew.ask(FLEET, "sleep")

    def restore(self) -> None:
        """Moves the trainer's weights back to the device if they are in host memory."""
        if self.spec.shares_memory:
            self.crew.ask(FLEET, "restore")

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        """Distributes requests among the members and returns at once. Thread-safe.

        Generators that share a process with their rank write only inside `wait`, which the program must then call.

        Returns:
            A future per request. It raises RolloutError if all members are lost. Its callbacks run in threads of
            the fleet and must not block.
        """
        tasks = [PendingRequest(request) for request in requests]
        self._begin(tasks)
        return [task.completion for task in tasks]

    def wait(self, results: "Sequence[Future[T]]") -> list[T]:
        """Waits for `results`: futures of `submit`, or others that depend on them. Meanwhile checks that all ranks are
        alive and that members with requests send completions. Only the program's thread may call it.

        Returns:
            The results. Raises the error of a future as soon as one fails.

        Raises:
            RolloutError: all members are lost.
            StoppedError: the run received a stop signal, and no generator is available to finish the step.
        """
        if self.writes_in_background:
            self._watch_until_done(results)
        else:
            self._write_until_done(results)
        for result in results:
            if result.done():
                result.result()  # raises if it failed: the others may not be done
        return [result.result() for result in results]

    def _watch_until_done(self, results: "Sequence[Future[Any]]") -> None:
        """Waits until all futures are done or one has failed, while checking ranks and members."""
        looked = time.monotonic()
        while not _are_settled(results, min(STOP_SECONDS, self._check_seconds)):
            self._stop_if_alone()
            if time.monotonic() - looked < self._check_seconds:
                continue
            with flight.phase("checking that all ranks are alive"):
                self.crew.ask(POLICY, "ping")
            self._mark_silent_lost()
            self._end_long_waits()
            looked = time.monotonic()

    def _stop_if_alone(self) -> None:
        """Raises StoppedError on a stop signal while no generator has joined."""
        if self._joined is not None and self.crew.signals and not self.members:
            raise StoppedError(
                f"stopped by {self.crew.signals[0]} while no generator was connected: resume with --resume auto"
            )

    @property
    def _check_seconds(self) -> float:
        return HEALTH_CHECK_SECONDS if self._joined is None else min(HEALTH_CHECK_SECONDS, self._joined.check_seconds)

    def write(self, requests: Sequence[Request]) -> list[Completion]:
        """Wakes the generators, has them write all `requests` with the weights of the last `sync`, and restores the
        trainer.

        Raises:
            RolloutError: all generators are lost.
        """
        try:
            with self.awake():
                return self.wait(self.submit(requests))
        finally:
            if self.crew.is_intact:
                self.restore()

    def write_with_each(self, requests: Sequence[Request]) -> dict[int, list[Completion]]:
        """Returns completions of the same `requests` by every generator, by member number. Lost generators are
        missing."""
        tasks = {member: [PendingRequest(request, pinned_to=member) for request in requests] for member in self.members}
        for own in tasks.values():
            self._begin(own)
        for own in tasks.values():
            with contextlib.suppress(RolloutError):
                self.wait([task.completion for task in own])
        return {
            member.number: [task.completion.result() for task in own]
            for member, own in tasks.items()
            if not any(task.completion.exception() for task in own)
        }

    def mark_lost(self, number: int, problem: str) -> None:
        """Marks member `number` as lost because of `problem`. It gets no requests until `restart`; a joined generator
        is removed."""
        with self._condition:
            for member in [one for one in self.members if one.number == number]:
                self._mark_lost(member, problem)

    def restart(self) -> None:
        """Restarts lost generators, and syncs the policy's current weights to all, without a new policy version. A
        generator that does not start is lost again. If generators share memory with the trainer, requests are held
        until it returns."""
        with self._condition:
            lost, postponed = self.lost, self.postponed
            self._held = [] if self.spec.shares_memory else None
        try:
            problems = self.crew.gather(FLEET, "restart", lost, frozenset(postponed))
        finally:
            with self._condition:
                held, self._held = self._held, None
                for member in self.members:
                    if member.number in lost:
                        member.problem, member.first_number = "", next(self._numbers)
        self._note(problems)
        with self._condition:
            for member in self.members:
                if not member.problem:
                    member.num_failed_restarts = 0
            self._assign(held or ())

    def postpone_restarts(self) -> None:
        """Postpones restarts of lost members by 1, 2, 4, ... policy versions. Meanwhile other members write."""
        with self._condition:
            for member in self.members:
                if member.number in self.lost:
                    member.postpone_restart(self.policy_version)

    @property
    def no_member_error(self) -> str:
        """Reason why no member writes, if none has joined for too long; else ""."""
        return self._joined.no_member_error if self._joined is not None and self._joined.has_timed_out else ""

    @property
    def newest(self) -> tuple[int, str]:
        """Number and hash of the published version that joined generators were last switched to."""
        assert self._joined is not None
        assert self._joined.version is not None
        return self._joined.version.version, self._joined.version.digest

    def _newest(self) -> UseVersion | None:
        with self._condition:
            return None if self._joined is None else self._joined.version

    def evaluate(self, number: int, digest: str) -> None:
        """Switches evaluators to the published version with this number and hash (`digest`)."""
        assert self.evaluators is not None
        self.evaluators.policy_version += 1
        self.evaluators._use(UseVersion(number, digest, self.evaluators.policy_version))

    def _use(self, version: UseVersion) -> None:
        """Switches joined generators, and those that join later, to a published version."""
        assert self._joined is not None
        with self._condition:
            self._joined.version = version
            for member in self.members:
                member.use(version)

    def close(self) -> None:
        """Ends the generators of ranks, and dismisses the joined ones."""
        if self._join_service is not None:
            self._join_service.close()
        self.crew.ask(FLEET, "close")
        if self.evaluators is not None:
            self.evaluators._dismiss()
        self._dismiss()

    def _dismiss(self) -> None:
        with self._condition:
            members, self.members = self.members, []
            if self._joined is not None:
                self._joined.is_closed = True
        for member in members:
            member.dismiss()

    def _let_join(self, spec: GeneratorSpec, choice: JoinedGeneratorConfig) -> None:
        """Opens the run to joining generators, and waits until enough have joined."""
        welcome = self.crew.ask(FLEET, "welcome", spec)
        assert spec.weight_sync.publish is not None
        with self._condition:  # generators that join meanwhile wait for the lock
            join_service = self._join_service = JoinService(spec, welcome, self._admit, self._newest)
            room = functools.partial(
                JoinedMembers,
                choice,
                spec.weight_sync.publish,
                join_service.command,
                itertools.count(),
                welcome.vocab_size,
            )
            joined = self._joined = room()
            asked = [(self, "at_least", choice.at_least, joined)]
            if choice.evaluators:
                evaluators = self.evaluators = Fleet(self.crew)
                evaluators.spec, evaluators._joined = spec, room(evaluate=True)
                asked.append((evaluators, "evaluators", choice.evaluators, evaluators._joined))
        for fleet, key, least, waited in asked:
            what = "evaluators" if waited.evaluate else "generators"
            print(f"waiting for {least} {what} to join: {waited.command}", flush=True)
            fleet._wait_for(key, least)

    def _wait_for(self, key: str, least: int) -> None:
        """Waits until `least` members have joined. `key` is the config key for the error."""
        joined = self._joined
        assert joined is not None

        def are_there() -> bool:
            with self._condition:
                return self._condition.wait_for(lambda: len(self.members) >= least, joined.longest_wait)

        (have_come,) = self.wait([in_thread(are_there, "waiting for generators")])
        if not have_come:
            raise InputError(
                f"rollout.generator.{key}={least}: only {len(self.members)} joined within wait_minutes="
                f"{joined.choice.wait_minutes:g}: start more with {joined.command}, or raise wait_minutes"
            )

    def _admit(self, name: str, connection: MessageConnection, evaluates: bool) -> None:
        """Adds a generator that has joined, and assigns it the waiting tasks."""
        with self._condition:
            joined, evaluators = self._joined, self.evaluators
        if evaluates and evaluators is not None:
            evaluators._admit(name, connection, evaluates=False)
            return
        assert joined is not None
        with self._condition:
            member = Member(next(joined.numbers), True, connection, self._handle_message, has_joined=True)
            if joined.is_closed:
                in_thread(member.dismiss, "dismissing")
                return
            self.members.append(member)
            joined.record_arrival(name, member)
            if joined.version is not None:
                member.use(joined.version)
            waiting, joined.waiting = joined.waiting, []
            self._assign(waiting)
            self._condition.notify_all()

    def _tell_version(self, joined: JoinedMembers) -> None:
        """Switches joined generators to the version published last."""
        published = self.crew.ask(FLEET, "published_version")
        if published is None:
            raise RolloutError(
                f"weight_sync.publish={joined.folder}: the weights for joined generators could not be written: free "
                "disk space and resume with --resume auto"
            )
        self._use(UseVersion(published[0], published[1], self.policy_version))

    def _end_long_waits(self) -> None:
        """Fails tasks that have waited too long for a member."""
        if self._joined is None:
            return
        with self._condition:
            waiting = [] if self.members else self._joined.take_expired()
        for task in waiting:
            task.completion.set_exception(RolloutError(self._joined.no_member_error))

    def _is_postponed(self, member: Member) -> bool:
        return member.next_restart_version > self.policy_version

    def _note(self, problems: Iterable[tuple[int, str]]) -> None:
        """Marks members as lost whose ranks have reported a problem."""
        lost = dict(problems)
        with self._condition:
            for member in self.members:
                if member.number in lost:
                    self._mark_lost(member, lost[member.number])

    def _begin(self, tasks: Sequence[PendingRequest]) -> None:
        with self._condition:
            self._assign(tasks)
            self._condition.notify_all()  # `_write_until_done` may wait for something to write

    def _assign(self, tasks: Sequence[PendingRequest]) -> None:
        """Assigns tasks to members. Turns of a conversation stay with its member while that is available."""
        if self._held is not None:
            self._held += tasks
            return
        if not tasks:
            return
        candidates = self.members if tasks[0].pinned_to is None else [tasks[0].pinned_to]
        available = [member for member in candidates if not member.problem]
        if not available:
            self._hold_or_fail(tasks, candidates)
            return
        shares: dict[Member, list[PendingRequest]] = {}
        fresh = []
        for task in tasks:
            conversation = task.request.conversation
            home = None if conversation is None else self._member_of_conversation.get(conversation)
            if home in available:
                shares.setdefault(home, []).append(task)
            else:
                fresh.append(task)
        for task, index in zip(fresh, divide([task.request for task in fresh], len(available)), strict=True):
            member = available[index]
            shares.setdefault(member, []).append(task)
            if task.request.conversation is not None:
                self._member_of_conversation[task.request.conversation] = member
        for member, own in shares.items():
            number = next(self._numbers)
            self._assignments[number] = Assignment(member, len(own), dict(enumerate(own)))
            member.send_requests(number, [task.request for task in own])

    def _hold_or_fail(self, tasks: Sequence[PendingRequest], candidates: Sequence[Member]) -> None:
        """Holds tasks until a member joins, or fails them if none can join."""
        if self._joined is not None and tasks[0].pinned_to is None:
            self._joined.hold(tasks)
            return
        first = candidates[0]
        for task in tasks:
            task.completion.set_exception(RolloutError(f"the {first.name} cannot write: {first.problem}"))

    def _write_until_done(self, results: "Sequence[Future[Any]]") -> None:
        """Has ranks write queued requests until all futures are done or one has failed."""
        unfinished, has_failed = len(results), False

        def note(done: "Future[Any]") -> None:
            nonlocal unfinished, has_failed
            with self._condition:
                unfinished, has_failed = unfinished - 1, has_failed or done.exception() is not None
                self._condition.notify_all()

        for result in results:
            result.add_done_callback(note)
        while True:
            with self._condition:  # completions may arrive after the remote call that wrote them
                self._condition.wait_for(
                    lambda: not unfinished or has_failed or any(member.queued for member in self.members)
                )
                if not unfinished or has_failed:
                    return
                queued = {member.number: member.take_queued() for member in self.members if member.queued}
            self.crew.ask(FLEET, "write", queued)

    def _handle_message(self, member: Member, message: Finished | GenerateFailed | Leaving | ReadingWeights) -> None:
        """Handles a message of a member, in that member's thread. Raises ProtocolError on an unrequested or invalid
        completion."""
        if isinstance(message, ReadingWeights):
            member.record_reading()
            return
        if isinstance(message, Leaving):
            with self._condition:
                self._mark_lost(member, message.text, count_loss=False)
            return
        if isinstance(message, GenerateFailed):
            with self._condition:
                if not message.number or message.number >= member.first_number:  # else before the restart
                    self._mark_lost(member, message.text)
            return
        with self._condition:
            assignment = self._assignments.get(message.number)
            if assignment is None:  # reassigned
                return
            self._check(member, assignment, message)
            task = assignment.open.pop(message.index, None)
            if task is None:  # sent twice
                return
            member.record_completion()
            if not assignment.open:
                del self._assignments[message.number]
        written = message.written
        task.completion.set_result(replace(written, writer=member.number) if member.has_joined else written)

    def _check(self, member: Member, assignment: Assignment, message: Finished) -> None:
        """Raises ProtocolError on a completion that was not requested from this member, or is invalid. Values are only
        checked of joined generators: ranks check their own."""
        if assignment.member is not member or not 0 <= message.index < assignment.size:
            raise ProtocolError(f"it sent completion {message.index} of {message.number}, which it was not assigned")
        if self._joined is not None and member.has_joined:
            task = assignment.open.get(message.index)
            if task is not None and (problem := message.written.problem(task.request, self._joined.vocab_size)):
                raise ProtocolError(problem)

    def _mark_lost(self, member: Member, problem: str, *, count_loss: bool = True) -> None:
        """Marks a member as lost and reassigns its unfinished tasks. `count_loss` counts the loss against them."""
        if self._joined is not None and member in self.members:
            self.members.remove(member)
            self._joined.record_departure(member, problem, is_last=not self.members)
            member.close()
        member.problem = member.problem or problem
        member.queued.clear()
        for number, assignment in [*self._assignments.items()]:
            if assignment.member is not member:
                continue
            del self._assignments[number]
            tasks = [*assignment.open.values()]
            failed = [task for task in tasks if count_loss and not task.count_loss(member)]
            self._assign([task for task in tasks if task not in failed])
            for task in failed:
                text = f"{task.losses} generators that it was assigned to were lost, the last: {problem}"
                task.completion.set_result(Completion([], [], "error", text))
        self._condition.notify_all()

    def _mark_silent_lost(self) -> None:
        """Marks members as lost that have requests but have sent nothing for `failures.hang_minutes`."""
        longest = watchdog.hang_seconds
        if longest is None:
            return
        with self._condition:
            now = time.monotonic()
            for member in {one.member for one in self._assignments.values() if one.silence(now) > longest}:
                self._mark_lost(member, f"it has sent nothing for {longest / 60:.3g} minutes (failures.hang_minutes)")


def _are_settled(results: "Sequence[Future[Any]]", seconds: float = 0.0) -> bool:
    """Waits up to `seconds`; returns whether all futures are done or one has failed."""
    done, open = futures.wait(results, seconds, return_when=futures.FIRST_EXCEPTION)
    return not open or any(result.exception() for result in done)
