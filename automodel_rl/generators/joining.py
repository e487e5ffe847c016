"""The run's side of generators that join it from anywhere, and leave, while it runs. A run writes its join address to
the folder of its published weights."""

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import AuthenticationError
from pathlib import Path

from automodel_rl.config.generators import JoinedGeneratorConfig
from automodel_rl.errors import InputError
from automodel_rl.files import write_private
from automodel_rl.generator_messages import Failure, UseVersion
from automodel_rl.generators.joining_messages import (
    FromGenerator,
    GeneratorStarted,
    JoinRequest,
    MessageConnection,
    ReadingWeights,
    RunEnded,
    Welcome,
    release,
)
from automodel_rl.generators.run_locations import JOIN_FILE, address_in
from automodel_rl.launch.authenticated import AuthenticatedConnection
from automodel_rl.launch.listener import HANDSHAKE_SECONDS, AuthenticatedListener


class JoinListener:
    """Listener for generators that join. Runs in threads until it is closed.

    Args:
        key: the run's key.
        folder: of published weights, where it writes the join address.
        welcome: settings for the generators.
        admit: called in its own thread for each generator that has started: name, connection, whether it runs
            evaluations.
        newest: returns the generators' weight version; None before the first.

    Attributes:
        address: the join address.

    Raises:
        InputError: the port is taken, the folder cannot be written to, or is in use by another run.
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
            raise InputError(f"weight_sync.publish={folder}: another run is using this folder: use one folder per run")
        try:
            self._listener = AuthenticatedListener(choice.host, choice.port, key, self._on_connection)
        except OSError as error:
            raise InputError(
                f"rollout.generator.port={choice.port}: cannot listen on it ({error.strerror}): choose another, or 0 "
                "for any"
            ) from None
        self.address = self._listener.address
        values = {"host": choice.host, "port": self.address.port, "key": self.address.key.hex()}
        try:
            write_private(self.file, json.dumps(values))
        except OSError as error:
            self._listener.close()
            raise InputError(
                f"weight_sync.publish={folder}: not writable ({error.strerror}): choose another folder"
            ) from None

    def close(self) -> None:
        """Stops listening, and tells generators that are starting that the run has ended."""
        self._listener.close()
        with self._guard:
            self._is_open = False
            for connection in self._starting:
                _tell_end(connection)
        with contextlib.suppress(OSError, InputError):
            if address_in(self.folder) == self.address:  # otherwise it is a newer run's
                self.file.unlink()

    def _on_connection(self, proven: AuthenticatedConnection) -> None:
        connection = MessageConnection(proven, FromGenerator())
        try:
            if not connection.poll(HANDSHAKE_SECONDS):
                raise EOFError
            first = connection.recv()
            if not isinstance(first, JoinRequest) or first.release != release():
                theirs = first.release if isinstance(first, JoinRequest) else "another release"
                connection.send(Failure(f"the run uses automodel_rl {release()}, not {theirs}: use the same release"))
                raise EOFError
            if first.evaluates and not self._has_evaluators:
                connection.send(
                    Failure("the run accepts no evaluators: set rollout.generator.evaluators, or omit --evaluate")
                )
                raise EOFError
            connection.send(replace(self.welcome, newest=self.newest()))
            if not self._starts(connection):
                raise EOFError
        except Exception:  # it is gone, or sends invalid messages
            connection.close()
            return
        self.admit(first.name, connection, first.evaluates)

    def _starts(self, connection: MessageConnection) -> bool:
        """Waits until a generator has started. Returns whether it did; the run may end first."""
        with self._guard:
            if not self._is_open:
                _tell_end(connection)
                return False
            self._starting.add(connection)
        try:
            while isinstance(message := connection.recv(), ReadingWeights):
                pass
        finally:
            with self._guard:
                self._starting.discard(connection)
        return isinstance(message, GeneratorStarted)


def _tell_end(connection: MessageConnection) -> None:
    with contextlib.suppress(OSError):
        connection.send(RunEnded())


def _is_answered(folder: Path) -> bool:
    """Returns whether a run answers at the folder's join address."""
    try:
        address = address_in(folder)
        if address is None:
            return False
        address.connect().close()
    except (InputError, AuthenticationError, OSError, EOFError):
        return False
    return True
