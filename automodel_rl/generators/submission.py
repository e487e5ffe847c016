"""The requests of one `Fleet.submit`: dealt among members, and what has become of them."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from automodel_rl.errors import RolloutError
from automodel_rl.generator_messages import Request
from automodel_rl.generators.member import Member
from automodel_rl.generators.protocol import Completion, OnFinished, OnLost

MOST_LOSSES = 3
"""A request whose generators were lost so often is to blame, and is not asked again."""

MOST_DISAPPEARANCES = 100
"""The same of generators that have joined and are gone without a reason, or that sent what no request asks for: their
machines may be taken away at any time."""


@dataclass(eq=False)
class Submission:
    """Requests that members of a fleet write.

    Attributes:
        requests, on_finished, on_lost: what `Fleet.submit` got.
        only: the member that is to write them; None for any.
        claimed: places whose completion has come.
        done: completions by place. They are there once `on_finished` has been called.
        losses: how often the generator of a request was lost, by place.
        disappearances: how often it was one that had joined and broke off, by place.
        settled: set once there is nothing to wait for.
        error: why those that are missing will not come.
    """

    requests: Sequence[Request]
    on_finished: OnFinished
    on_lost: OnLost
    only: Member | None = None
    claimed: set[int] = field(default_factory=set)
    done: dict[int, Completion] = field(default_factory=dict)
    losses: Counter[int] = field(default_factory=Counter)
    disappearances: Counter[int] = field(default_factory=Counter)
    settled: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def note_loss(self, member: Member, problem: str, places: Sequence[int]) -> list[int]:
        """Notes that a member is lost that was to write some places. Gives those that are to blame for it."""
        if self.only is not None:
            return []
        is_gone = member.has_joined and member.broke_off
        counts, most = (self.disappearances, MOST_DISAPPEARANCES) if is_gone else (self.losses, MOST_LOSSES)
        counts.update(places)
        return [place for place in places if counts[place] >= most]

    def finish(self, place: int, completion: Completion) -> None:
        """Takes the completion of a place, which the caller has claimed."""
        try:
            self.on_finished(place, completion)
        except BaseException as error:
            self.fail(error)
        self.done[place] = completion
        if len(self.done) == len(self.requests):
            self.settled.set()

    def fail(self, error: BaseException) -> None:
        """Ends the waiting for what is missing."""
        if not self.settled.is_set():
            self.error = error
            self.settled.set()
            self.on_lost(error)

    def completions(self) -> list[Completion]:
        """Waits for the completions, and returns them in the order of the requests."""
        self.settled.wait()
        if self.error is not None:
            raise self.error
        return [self.done[place] for place in range(len(self.requests))]


@dataclass(eq=False)
class Assignment:
    """The places of a submission that a member writes.

    Attributes:
        submission, places, member: the places, and who writes them.
        left: how many have not come.
        since: time at which the member was asked, by the monotonic clock.
    """

    submission: Submission
    places: list[int]
    member: Member
    left: int
    since: float = field(default_factory=time.monotonic)

    def silence(self, now: float) -> float:
        """Seconds in which the member has sent nothing although it was asked."""
        return now - max(self.since, self.member.heard)


def nobody_writes(member: Member) -> RolloutError:
    """The error of a submission that no member can write."""
    return RolloutError(f"the {member.name} cannot write: {member.problem}")


def deal(requests: Sequence[Request], num_members: int) -> list[int]:
    """A member for each request, by its place among the members. All get equally many.

    Completions of one prompt are of similar length. So they go to different members, which then finish together. Where
    prompts are longer than what may be written after them, reading counts for more: then requests that stand next to
    each other, as those of one prompt do, go to one member, which has the prompt cached from the second on.

    Args:
        requests: the requests, without those of conversations that have a member already.
        num_members: number of members.
    """
    read = sum(len(request.prompt) for request in requests)
    written = sum(request.sampling.max_tokens for request in requests)
    if read > written:
        return [turn * num_members // len(requests) for turn in range(len(requests))]
    numbers = (turn if request.conversation is None else request.conversation for turn, request in enumerate(requests))
    return [number % num_members for number in numbers]
