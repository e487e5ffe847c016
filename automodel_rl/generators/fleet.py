"""Fleet: the generators of a policy, as a program uses them."""

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.errors import RolloutError
from automodel_rl.generator_messages import Failed, Finished, Request
from automodel_rl.generators import jobs
from automodel_rl.generators.meeting import Meeting
from automodel_rl.generators.member import Member
from automodel_rl.generators.protocol import Completion, OnFinished, OnLost, do_nothing, not_told
from automodel_rl.generators.submission import MOST_LOSSES, Assignment, Submission, nobody_writes
from automodel_rl.launch import watchdog
from automodel_rl.launch.background import in_thread
from automodel_rl.launch.flight import flight
from automodel_rl.policy.crew import Crew
from automodel_rl.policy.jobs import Job

T = TypeVar("T")

LOOK_SECONDS = 30.0
"""Seconds between two looks whether all ranks and members are there, while a program waits for completions."""


class Fleet:
    """The generators of a policy. A program calls its methods; nothing in it is a collective.

    Each generator is a member, led by a rank. What a member that is lost was to write goes to others, with the same
    seeds; `restart` brings it back. A request with which three members were lost becomes a completion with an error.
    The turns of a conversation go to one member, which has their beginning cached.

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
        self._news = threading.Condition()  # guards what follows, and all members and submissions
        self._numbers = itertools.count(1)
        self._assignments: dict[int, Assignment] = {}
        self._held: list[tuple[Submission, Sequence[int]]] | None = None

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
        """Why members are lost that `restart` starts again, by rank."""
        return {one.rank: one.problem for one in self.members if one.problem and not self._is_given_up(one)}

    @property
    def given_up(self) -> dict[int, str]:
        """Why members are lost that did not come back, by rank. Another start is tried some policy versions later."""
        return {one.rank: one.problem for one in self.members if one.problem and self._is_given_up(one)}

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
        self.sync_again()

    def sync_again(self) -> None:
        """Gives all generators the weights that the policy has now, as the same policy version as before."""
        self._note(self.crew.ask(jobs.SyncWeights(self.policy_version)))

    @contextlib.contextmanager
    def awake(self, timed: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()) -> Iterator[None]:
        """Lets generators write in this block. Generators that share memory with the trainer have the memory meanwhile.
        After it the trainer's weights may still be on the host.

        Args:
            timed: a block that measures how long the phase with this name takes.
        """
        if not self.spec.shares_memory:
            yield
            return
        try:
            with timed("wake"):
                self._note(self.crew.ask(jobs.Wake()))
                if self.lost:
                    self.restart()
            yield
        finally:
            if self.crew.is_intact:
                with timed("sleep"):
                    self.warning = self.crew.ask(jobs.Sleep())[0]

    def restore(self) -> None:
        """Brings the trainer's weights back, if they are on the host."""
        if self.spec.shares_memory:
            self.crew.ask(jobs.Restore())

    def submit(
        self, requests: Sequence[Request], on_finished: OnFinished = do_nothing, on_lost: OnLost = not_told
    ) -> Callable[[], list[Completion]]:
        """Lets generators begin to write. Any thread may call it, and none waits.

        Args:
            requests: the completions to write, which are dealt to the members.
            on_finished: called for every completion, by another thread.
            on_lost: called if all members are lost before all completions have come.

        Returns:
            A function that waits for the completions, in the order of the requests. If generators do not work alone,
            the program's own thread must call it. It raises RolloutError if all members are lost.
        """
        return functools.partial(self._completions, self._begin(Submission(requests, on_finished, on_lost)))

    def waited(self, wait: Callable[[], T]) -> T:
        """What a function returns that waits for completions. Meanwhile this looks whether all ranks are there, and
        whether members that have something to write do send something.

        Args:
            wait: the function.
        """
        if not self.works_alone:
            return wait()
        result = in_thread(wait, "waiting")
        while not futures.wait([result], LOOK_SECONDS).done:
            with flight.phase("asking whether all ranks are there"):
                self.crew.ask(Job())
            self._lose_those_that_are_silent()
        return result.result()

    def write(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions by the generators, with the weights of the last `sync`.

        Args:
            requests: the completions to write, which are dealt to the generators.

        Raises:
            RolloutError: all generators are lost.
        """
        try:
            with self.awake():
                return self.waited(self.submit(requests))
        finally:
            if self.crew.is_intact:
                self.restore()

    def write_alike(self, requests: Sequence[Request]) -> dict[int, list[Completion]]:
        """Completions of the same requests by every generator, by its leader's rank. A lost generator has none.

        Args:
            requests: the completions to write.
        """
        submissions = [self._begin(Submission(requests, do_nothing, not_told, member)) for member in self.members]

        def wait() -> None:
            for submission in submissions:
                with contextlib.suppress(RolloutError):
                    self._completions(submission)

        self.waited(wait)
        of_members = zip(self.members, submissions, strict=True)
        return {member.rank: submission.completions() for member, submission in of_members if submission.error is None}

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
        version as before. One that does not start is lost again. Requests wait for the end of it, if generators have
        the trainer's memory in turns."""
        with self._news:
            lost, given_up = self.lost, self.given_up
            self._held = [] if self.spec.shares_memory else None
        try:
            problems: list[tuple[int, str]] = self.crew.ask(jobs.RestartGenerators(lost, frozenset(given_up)))
        finally:
            with self._news:
                held, self._held = self._held, None
                for member in self.members:
                    if member.rank in lost:
                        member.problem, member.first_number = "", next(self._numbers)
        self._note(problems)
        with self._news:
            for member in self.members:
                if not member.problem:
                    member.num_given_up = 0
            for submission, places in held or ():
                self._deal(submission, places)

    def give_up(self) -> None:
        """Notes that members that are lost do not come back: other starts are tried after 1, 2, 4 ... further policy
        versions. Until then others write."""
        with self._news:
            for member in self.members:
                if member.rank in self.lost:
                    member.give_up(self.policy_version)

    def close(self) -> None:
        """Ends all generators."""
        self.crew.ask(jobs.CloseGenerators())
        for member in self.members:
            member.close()

    def _is_given_up(self, member: Member) -> bool:
        return member.tried_again_at > self.policy_version

    def _note(self, problems: Iterable[tuple[int, str]]) -> None:
        """Learns from ranks that their generators are lost."""
        lost = dict(problems)
        with self._news:
            for member in self.members:
                if member.rank in lost:
                    self._lose(member, lost[member.rank])

    def _begin(self, submission: Submission) -> Submission:
        if not submission.requests:
            submission.settled.set()
        with self._news:
            self._deal(submission, range(len(submission.requests)))
        return submission

    def _deal(self, submission: Submission, places: Sequence[int]) -> None:
        """Gives members requests in turn, or by their conversations."""
        if self._held is not None:
            self._held.append((submission, places))
            return
        candidates = self.members if submission.only is None else [submission.only]
        well = [member for member in candidates if not member.problem]
        if places and not well:
            submission.fail(nobody_writes(candidates[0]))
            return
        shares: dict[Member, list[int]] = {}
        for turn, place in enumerate(places):
            conversation = submission.requests[place].conversation
            shares.setdefault(well[(turn if conversation is None else conversation) % len(well)], []).append(place)
        for member, own in shares.items():
            number = next(self._numbers)
            self._assignments[number] = Assignment(submission, own, member, len(own))
            member.ask(number, [submission.requests[place] for place in own])

    def _completions(self, submission: Submission) -> list[Completion]:
        """Waits for the completions of a submission. Those of members that do not work alone are written now."""
        while not self.works_alone and not submission.settled.is_set():
            with self._news:
                queued = {member.rank: member.take_queued() for member in self.members if member.queued}
            if queued:
                self.crew.ask(jobs.Write(queued))
            with self._news:  # what they have written may still be on its way
                self._news.wait_for(
                    lambda: submission.settled.is_set() or any(member.queued for member in self.members)
                )
        return submission.completions()

    def _take(self, member: Member, message: Finished | Failed) -> None:
        """Takes what a member sends. Its thread calls it."""
        if isinstance(message, Failed):
            with self._news:
                if not message.number or message.number >= member.first_number:  # else of a generator before
                    self._lose(member, message.text)
            return
        with self._news:
            assignment = self._assignments.get(message.number)
            place = -1 if assignment is None else assignment.places[message.place]
            if assignment is None or place in assignment.submission.claimed:
                return
            assignment.submission.claimed.add(place)
            assignment.left -= 1
            if not assignment.left:
                del self._assignments[message.number]
        assignment.submission.finish(place, message.written)
        if not self.works_alone:
            with self._news:
                self._news.notify_all()

    def _lose(self, member: Member, problem: str) -> None:
        """Lets others write what a member was to write."""
        member.problem = member.problem or problem
        member.queued.clear()
        for number, assignment in [*self._assignments.items()]:
            if assignment.member is not member:
                continue
            del self._assignments[number]
            submission = assignment.submission
            left = [place for place in assignment.places if place not in submission.claimed]
            submission.losses.update(left)
            to_blame = [place for place in left if submission.losses[place] >= MOST_LOSSES and submission.only is None]
            submission.claimed.update(to_blame)
            self._deal(submission, [place for place in left if place not in to_blame])
            for place in to_blame:
                text = f"{MOST_LOSSES} generators were lost that were to write it, the last: {problem}"
                submission.finish(place, Completion([], [], "error", text))
        self._news.notify_all()

    def _lose_those_that_are_silent(self) -> None:
        """Holds members for lost that have something to write, and have sent nothing for as long as a rank may hang."""
        longest = watchdog.hang_seconds
        if longest is None:
            return
        with self._news:
            now = time.monotonic()
            for member in {one.member for one in self._assignments.values() if one.silence(now) > longest}:
                self._lose(member, f"it has written nothing for {longest / 60:.3g} minutes (failures.hang_minutes)")
