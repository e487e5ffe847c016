"""Members that join a fleet: the listener, their weights, and the requests that wait while there is none."""

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
from automodel_rl.generators.joining import JoinListener
from automodel_rl.generators.joining_messages import MessageConnection, Welcome
from automodel_rl.generators.member import Member
from automodel_rl.generators.pending_requests import PendingRequest
from automodel_rl.generators.run_locations import WeightsServerInfo, run_key
from automodel_rl.weight_sync.version_server import VersionServer

LOOKS = 10
"""Number of checks for members within `rollout.generator.wait_minutes`."""


class JoinService:
    """A run's listener for joining generators, and its weights server if configured.

    Args:
        welcome: the settings that joining generators receive.
        admit: called with name, connection and `evaluates` of each generator that has started, in its own thread.
        newest: returns the version to write with; None before the first.

    Attributes:
        command: the command line that starts a joining generator.

    Raises:
        InputError: a port is in use, the folder is not writable, or another run listens there.
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
                welcome = replace(welcome, weights=WeightsServerInfo(server.port, server.salt))
            self.listener = JoinListener(choice, key, folder, welcome, admit, newest)
            opened.callback(self.listener.close)
            self._open = opened.pop_all()
        atexit.register(self._open.close)  # removes the address if the run ends with an error
        if server is not None:
            address, file = self.listener.address, choice.key or "a file with the key in join.json"
            self.command += f", or --join {address.host}:{address.port} --key {file}"

    def close(self) -> None:
        """Closes the listener and the weights server."""
        atexit.unregister(self._open.close)
        self._open.close()


def _serve_weights(choice: JoinedGeneratorConfig, folder: Path, key: bytes) -> VersionServer | None:
    """Starts the server for generators that do not share the folder; None if not configured."""
    port = choice.weights_port
    if port is None:
        return None
    try:
        return VersionServer(folder, choice.host, port, key)
    except OSError as error:
        raise InputError(
            f"rollout.generator.weights_port={port}: cannot listen on it ({error.strerror}): choose another, or 0 for "
            "any"
        ) from None


class JoinedMembers:
    """A fleet's state of joined members, guarded by the fleet's lock.

    Args:
        folder: the folder of published weights.
        command: the command line that starts a joining generator.
        numbers: numbers for members that join.
        evaluate: whether they only write for evaluations.

    Attributes:
        version: the published version that they write with; None before the first.
        waiting: tasks that wait for a member.
        has_timed_out: whether the fleet has stopped waiting for a member.
        is_closed: whether the run has ended, so that late members are dismissed.
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
        self.has_timed_out = self.is_closed = False
        self._empty_since = self._waiting_since = time.monotonic()
        self._last_problem = ""

    @property
    def longest_wait(self) -> float:
        """Seconds without a member after which waiting tasks fail."""
        return 60 * self.choice.wait_minutes

    @property
    def check_seconds(self) -> float:
        """Seconds between checks for members."""
        return self.longest_wait / LOOKS

    @property
    def no_member_error(self) -> str:
        """Error message for requests that no member joined to write."""
        who = "evaluator" if self.evaluate else "generator"
        left = f" since the last left ({self._last_problem})" if self._last_problem else ""
        return (
            f"no {who} has joined within rollout.generator.wait_minutes={self.choice.wait_minutes:g}"
            f"{left}: start some with {self.command}, and resume with --resume auto"
        )

    def record_arrival(self, name: str, member: Member) -> None:
        """Records and announces a member that has joined."""
        self.has_timed_out = False
        _say(f"{member.name} has joined{', for evaluations' if self.evaluate else ''}: {name}")

    def record_departure(self, member: Member, problem: str, *, is_last: bool) -> None:
        """Records and announces a member that has left."""
        _say(f"{member.name} has left: {problem}")
        self._last_problem = problem
        if is_last:
            self._empty_since = time.monotonic()

    def hold(self, tasks: Sequence[PendingRequest]) -> None:
        """Holds tasks until a member joins."""
        if not self.waiting:
            self._waiting_since = time.monotonic()
        self.waiting += tasks

    def take_expired(self) -> list[PendingRequest]:
        """Removes and returns the waiting tasks if no member has joined for too long. Call only without members."""
        if time.monotonic() - max(self._empty_since, self._waiting_since) < self.longest_wait:
            return []
        self.has_timed_out = True
        waiting, self.waiting = self.waiting, []
        return waiting


def _say(text: str) -> None:
    """Prints a line in one write, since other threads print, too. Joining generators may have chosen parts of it, so
    unprintable characters are replaced."""
    printed = "".join(character if character.isprintable() else "?" for character in text)
    with contextlib.suppress(OSError, ValueError):  # stdout is closed, or cannot encode a character
        sys.stdout.write(f"{printed}\n")
        sys.stdout.flush()
