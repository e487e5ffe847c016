"""The program's side of generators that join a run from anywhere, and leave it, while it goes on. A run writes its
address to the folder of its published weights."""

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import AuthenticationError
from pathlib import Path

from automodel_rl.config.generators import JoinedGeneratorConfig
from automodel_rl.errors import InputError
from automodel_rl.files import write_for_owner
from automodel_rl.generator_messages import Failure, UseVersion
from automodel_rl.generators.joining_messages import (
    FromGenerator,
    HasEnded,
    HasStarted,
    IsReading,
    Joining,
    MessageConnection,
    Welcome,
    release,
)
from automodel_rl.generators.run_places import JOIN_FILE, address_in
from automodel_rl.launch.authenticated import AuthenticatedConnection
from automodel_rl.launch.door import HANDSHAKE_SECONDS, Door


class JoiningDoor:
    """Lets generators join, in threads, until it is closed.

    Args:
        choice: where to listen.
        key: the run's key.
        folder: the folder of published weights, which gets the run's address.
        welcome: what generators need.
        admit: called for each generator that has started, in a thread of its own, with the name, the connection, and
            whether it evaluates.
        newest: returns the version of weights that generators write with; None before the first.

    Attributes:
        address: where generators join.

    Raises:
        InputError: the port is taken, the folder cannot be written to, or another run lets generators join there.
    """

    def __init__(
        self,
        choice: JoinedGeneratorConfig,
        key: bytes,
        folder: Path,
        welcome: Welcome,
        admit: Callable[[str, MessageConnection, bool], None],
        newest: Callable[[], UseVersion | None],
    ):
        self.newest = newest
        self.welcome, self.admit, self.folder, self.file = welcome, admit, folder, folder / JOIN_FILE
        self._has_evaluators = choice.evaluators > 0
        self._guard, self._is_open = threading.Lock(), True
        self._starting: set[MessageConnection] = set()
        if _is_answered(folder):
            raise InputError(
                f"weight_sync.publish={folder}: another run lets generators join there: give each run a folder of its "
                "own"
            )
        try:
            self._door = Door(choice.host, choice.port, key, self._greet)
        except OSError as error:
            raise InputError(
                f"rollout.generator.port={choice.port} cannot be listened on ({error.strerror}): choose another, or 0 "
                "for any"
            ) from None
        self.address = self._door.address
        values = {"host": choice.host, "port": self.address.port, "key": self.address.key.hex()}
        try:
            write_for_owner(self.file, json.dumps(values))
        except OSError as error:
            self._door.close()
            raise InputError(
                f"weight_sync.publish={folder}: cannot be written ({error.strerror}): choose another folder"
            ) from None

    def close(self) -> None:
        """Lets no more generators join, and tells those that are starting that the run has ended."""
        self._door.close()
        with self._guard:
            self._is_open = False
            for connection in self._starting:
                _tell_end(connection)
        with contextlib.suppress(OSError, InputError):
            if address_in(self.folder) == self.address:  # else of a run that has come since
                self.file.unlink()

    def _greet(self, proven: AuthenticatedConnection) -> None:
        connection = MessageConnection(proven, FromGenerator())
        try:
            if not connection.poll(HANDSHAKE_SECONDS):
                raise EOFError
            first = connection.recv()
            if not isinstance(first, Joining) or first.release != release():
                theirs = first.release if isinstance(first, Joining) else "another one"
                connection.send(Failure(f"the run is of automodel_rl {release()}, and this is {theirs}: use the same"))
                raise EOFError
            if first.evaluates and not self._has_evaluators:
                connection.send(
                    Failure("the run evaluates by itself: set rollout.generator.evaluators, or join without")
                )
                raise EOFError
            connection.send(replace(self.welcome, newest=self.newest()))
            if not self._starts(connection):
                raise EOFError
        except Exception:  # it is gone, or what it sends cannot be read
            connection.close()
            return
        self.admit(first.name, connection, first.evaluates)

    def _starts(self, connection: MessageConnection) -> bool:
        """Waits until a generator has started. Meanwhile the run may end."""
        with self._guard:
            if not self._is_open:
                _tell_end(connection)
                return False
            self._starting.add(connection)
        try:
            while isinstance(message := connection.recv(), IsReading):
                pass
        finally:
            with self._guard:
                self._starting.discard(connection)
        return isinstance(message, HasStarted)


def _tell_end(connection: MessageConnection) -> None:
    with contextlib.suppress(OSError):
        connection.send(HasEnded())


def _is_answered(folder: Path) -> bool:
    """Whether a run answers at the address that is in a folder."""
    try:
        address = address_in(folder)
        if address is None:
            return False
        address.knock().close()
    except (InputError, AuthenticationError, OSError, EOFError):
        return False
    return True
