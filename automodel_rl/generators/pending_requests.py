"""The requests of a fleet on their way to completions, and how they are divided among its members."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from automodel_rl.generator_messages import Request
from automodel_rl.generators.member import Member
from automodel_rl.generators.protocol import Completion

MAX_LOSSES = 3
"""Lost generators after which a request fails instead of being retried."""

MAX_DISCONNECTS = 100
"""The same for joined generators whose connection broke or that sent invalid messages: their machines may be preempted
at any time."""


@dataclass(eq=False)
class PendingRequest:
    """A request and the future of its completion.

    Attributes:
        pinned_to: the one member that may write it; None if any may. It is not retried elsewhere.
        losses: generators lost while they were writing it.
        disconnects: of these, joined generators that disconnected.
    """

    request: Request
    pinned_to: Member | None = None
    completion: "Future[Completion]" = field(default_factory=Future)
    losses: int = 0
    disconnects: int = 0

    def count_loss(self, member: Member) -> bool:
        """Counts the loss of the member that was writing it. Returns whether the request may be retried."""
        if self.pinned_to is not None:
            return True  # nobody else may write it, so dealing it again fails it
        self.losses += 1
        self.disconnects += member.has_joined and member.is_disconnected
        return self.disconnects < MAX_DISCONNECTS and self.losses - self.disconnects < MAX_LOSSES


@dataclass(eq=False)
class Assignment:
    """The tasks that one member got in one message.

    Attributes:
        size: number of tasks in the message.
        open: the tasks that it has not completed, by their index in the message.
        since: when it got them, by the monotonic clock.
    """

    member: Member
    size: int
    open: dict[int, PendingRequest]
    since: float = field(default_factory=time.monotonic)

    def silence(self, now: float) -> float:
        """Seconds since the member last sent something, counted from when it got these tasks."""
        return now - max(self.since, self.member.last_heard)


def divide(requests: Sequence[Request], num_members: int) -> list[int]:
    """Returns the index of a member for each request. All members get equally many.

    Completions of one prompt have similar lengths, so they go to different members, which then finish together. If
    prompts are longer than the completions may be, prefilling dominates: adjacent requests, such as those of one
    prompt, go to one member, which has the prompt cached from the second on.

    Args:
        requests: the requests, without turns of conversations that a member already has.
        num_members: number of members.
    """
    read = sum(len(request.prompt) for request in requests)
    written = sum(request.sampling.max_tokens for request in requests)
    if read > written:
        return [turn * num_members // len(requests) for turn in range(len(requests))]
    numbers = (turn if request.conversation is None else request.conversation for turn, request in enumerate(requests))
    return [number % num_members for number in numbers]
