"""Members that have joined a fleet: who may come, what they write with, and what waits while none is there."""

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import JoinedGeneratorConfig
from automodel_rl.generator_messages import UseVersion
from automodel_rl.generators.joining import JoiningDoor, Welcome
from automodel_rl.generators.member import Member
from automodel_rl.generators.submission import Submission

LOOKS = 10
"""Number of looks for members in the longest wait for one."""


class JoinedMembers:
    """What a fleet knows of the members that have joined it. The fleet guards all of it.

    Args:
        spec: the generator that is asked for, which joins.
        welcome: what generators need.
        admit: called with the name and the connection of each that has started, in a thread of its own.

    Attributes:
        door: lets them join.
        numbers: the numbers of those that will join.
        version: the version of weights that they write with; None before the first.
        waiting: requests that wait for a member, and their places.
        is_given_up: whether nobody waits for a member any longer.
    """

    def __init__(self, spec: GeneratorSpec, welcome: Welcome, admit: Callable[[str, Connection], None]):
        assert isinstance(spec.choice, JoinedGeneratorConfig)
        assert spec.weight_sync.publish is not None
        self.choice, self.folder = spec.choice, spec.weight_sync.publish
        self.numbers = itertools.count()
        self.version: UseVersion | None = None
        self.waiting: list[tuple[Submission, Sequence[int]]] = []
        self.is_given_up = False
        self._alone_since = time.monotonic()
        self.door = JoiningDoor(self.choice, self.folder, welcome, admit)

    @property
    def longest_wait(self) -> float:
        """Seconds without a member after which nobody waits for one."""
        return 60 * self.choice.wait_minutes

    @property
    def look_seconds(self) -> float:
        """Seconds between two looks whether a member is there."""
        return self.longest_wait / LOOKS

    @property
    def nobody(self) -> str:
        """Why requests are not written for which nobody came."""
        return (
            f"no generator is there, and none has joined in rollout.generator.wait_minutes={self.choice.wait_minutes:g}"
            f": start some with automodel-rl generate --join {self.folder}, and go on with --resume auto"
        )

    def welcome(self, name: str, member: Member) -> None:
        """Notes that a member has come."""
        self.is_given_up = False
        _say(f"{member.name} has joined: {name}")

    def part(self, member: Member, problem: str, *, is_last: bool) -> None:
        """Notes that a member has left."""
        _say(f"{member.name} has left: {problem}")
        if is_last:
            self._alone_since = time.monotonic()

    def give_up(self) -> list[Submission]:
        """What has waited too long for a member, now that none is there."""
        if time.monotonic() - self._alone_since < self.longest_wait:
            return []
        self.is_given_up = True
        waiting, self.waiting = self.waiting, []
        return [submission for submission, _ in waiting]


def _say(text: str) -> None:
    """Prints a line at once, for other threads print, too."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
