"""Members that join a fleet: the way in, what they write with, and what waits while none is there."""

import atexit
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import JoinedGeneratorConfig
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import UseVersion
from automodel_rl.generators.joining import JoiningDoor
from automodel_rl.generators.joining_messages import MessageConnection, Welcome
from automodel_rl.generators.member import Member
from automodel_rl.generators.pending_requests import PendingRequest
from automodel_rl.generators.run_places import WeightsGiven, run_key
from automodel_rl.weight_sync.version_server import VersionServer

LOOKS = 10
"""Number of looks for members in the longest wait for one."""


class WayIn:
    """A run's door for those that join it, and the server of its weights if there is one.

    Args:
        spec: the generator that is asked for, which joins.
        welcome: what generators need.
        admit: called for each that has started, in a thread of its own, with the name, the connection, and whether it
            evaluates.
        newest: returns the version of weights that generators write with; None before the first.

    Attributes:
        door: lets them join.
        command: the command that starts one that joins.

    Raises:
        InputError: a port is taken, the folder cannot be written to, or another run lets generators join there.
    """

    def __init__(
        self,
        spec: GeneratorSpec,
        welcome: Welcome,
        admit: Callable[[str, MessageConnection, bool], None],
        newest: Callable[[], UseVersion | None],
    ):
        assert isinstance(spec.choice, JoinedGeneratorConfig)
        assert spec.weight_sync.publish is not None
        choice, folder = spec.choice, spec.weight_sync.publish
        key = run_key(choice.key)
        self.command = f"automodel-rl generate --join {folder}"
        with contextlib.ExitStack() as opened:
            server = _serve_weights(choice, folder, key)
            if server is not None:
                opened.callback(server.close)
                welcome = replace(welcome, weights=WeightsGiven(server.port, server.salt))
            self.door = JoiningDoor(choice, key, folder, welcome, admit, newest)
            opened.callback(self.door.close)
            self._open = opened.pop_all()
        atexit.register(self._open.close)  # a run that ends with an error leaves no address behind
        if server is not None:
            address, file = self.door.address, choice.key or "a file with the key in join.json"
            self.command += f", or --join {address.host}:{address.port} --key {file}"

    def close(self) -> None:
        """Lets no more join."""
        atexit.unregister(self._open.close)
        self._open.close()


def _serve_weights(choice: JoinedGeneratorConfig, folder: Path, key: bytes) -> VersionServer | None:
    """Gives published weights to those that do not share the folder, if the run does."""
    port = choice.weights_port
    if port is None:
        return None
    try:
        return VersionServer(folder, choice.host, port, key)
    except OSError as error:
        raise InputError(
            f"rollout.generator.weights_port={port} cannot be listened on ({error.strerror}): choose another, or 0 "
            "for any"
        ) from None


class JoinedMembers:
    """What a fleet knows of the members that have joined it. The fleet guards all of it.

    Args:
        choice: the kind of generators, which join.
        folder: the folder of published weights.
        command: the command that starts one that joins.
        numbers: the numbers of those that will join.
        vocab_size: number of the model's token ids.
        evaluate: whether they write for evaluations alone.

    Attributes:
        version: the version of weights that they write with; None before the first.
        waiting: tasks that wait for a member.
        is_given_up: whether nobody waits for a member any longer.
        is_closed: whether the run has ended, so that those that still come are told so.
    """

    def __init__(
        self,
        choice: JoinedGeneratorConfig,
        folder: Path,
        command: str,
        numbers: Iterator[int],
        vocab_size: int,
        *,
        evaluate: bool = False,
    ):
        self.choice, self.folder, self.numbers, self.evaluate = choice, folder, numbers, evaluate
        self.vocab_size = vocab_size
        self.command = f"{command} --evaluate" if evaluate else command
        self.version: UseVersion | None = None
        self.waiting: list[PendingRequest] = []
        self.is_given_up = self.is_closed = False
        self._alone_since = self._waiting_since = time.monotonic()
        self._last_problem = ""

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
        who = "evaluator" if self.evaluate else "generator"
        left = f" since the last left ({self._last_problem})" if self._last_problem else ""
        return (
            f"no {who} is there, and none has joined in rollout.generator.wait_minutes={self.choice.wait_minutes:g}"
            f"{left}: start some with {self.command}, and go on with --resume auto"
        )

    def welcome(self, name: str, member: Member) -> None:
        """Notes that a member has come."""
        self.is_given_up = False
        _say(f"{member.name} has joined{', for evaluations' if self.evaluate else ''}: {name}")

    def part(self, member: Member, problem: str, *, is_last: bool) -> None:
        """Notes that a member has left."""
        _say(f"{member.name} has left: {problem}")
        self._last_problem = problem
        if is_last:
            self._alone_since = time.monotonic()

    def hold(self, tasks: Sequence[PendingRequest]) -> None:
        """Keeps tasks until a member joins."""
        if not self.waiting:
            self._waiting_since = time.monotonic()
        self.waiting += tasks

    def give_up(self) -> list[PendingRequest]:
        """Returns the tasks that have waited too long for a member, now that none is there."""
        if time.monotonic() - max(self._alone_since, self._waiting_since) < self.longest_wait:
            return []
        self.is_given_up = True
        waiting, self.waiting = self.waiting, []
        return waiting


def _say(text: str) -> None:
    """Prints a line at once, for other threads print, too. A generator may have chosen parts of it."""
    printed = "".join(character if character.isprintable() else "?" for character in text)
    with contextlib.suppress(OSError, ValueError):  # nobody reads it, or its encoding lacks a character
        sys.stdout.write(f"{printed}\n")
        sys.stdout.flush()
