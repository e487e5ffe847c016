"""The program's side of generators that join a run from anywhere, and leave it, while it goes on.

A run writes its address to the folder of its published weights:

    a generator sends      the program answers
    Joining                Welcome, or a Failure and the end of the connection
    HasStarted             UseVersion and Generate, in the order in which they count; at the end of the run HasEnded
    Finished, Failed       nothing
    IsReading              nothing: it reads a version of the weights, which may take long
    Leaving                the end of the connection
"""

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from automodel_rl.compat.versions import own_version
from automodel_rl.config.generators import JoinedGeneratorConfig
from automodel_rl.errors import InputError
from automodel_rl.files import write_for_owner
from automodel_rl.generator_messages import PROTOCOL, Failure, Message
from automodel_rl.generators.model_copy import ModelCopy
from automodel_rl.generators.run_places import JOIN_FILE, WeightsGiven, address_in
from automodel_rl.generators.transformers_generator import Writing
from automodel_rl.launch.door import Door


def release() -> str:
    """What both sides must have in common: the package's release, and the messages that it knows."""
    return f"{own_version()} {PROTOCOL[:12]}"


@dataclass(frozen=True)
class Joining(Message):
    """A generator wants to join.

    Attributes:
        name: its process, in words.
        evaluates: whether it writes for evaluations alone.
        release: what it knows.
    """

    name: str
    evaluates: bool = False
    release: str = field(default_factory=release)


@dataclass(frozen=True)
class Welcome(Message):
    """What a generator needs to start.

    Attributes:
        copy: the model, for the transformers generator. The generator chooses the device.
        writing: how that writes completions.
        vllm: the arguments of vllm.LLM that follow from the run.
        timeout: the run's weight_sync.timeout, in seconds.
        vocab_size: number of the model's token ids.
        weights: how the run gives its published weights over HTTP; None if it does not.
    """

    copy: ModelCopy
    writing: Writing
    vllm: dict[str, Any]
    timeout: float
    vocab_size: int
    weights: WeightsGiven | None = None


@dataclass(frozen=True)
class HasStarted(Message):
    """The generator has started, and takes versions of weights and requests."""


@dataclass(frozen=True)
class Leaving(Message):
    """The generator writes no more; `text` is the reason. Nothing that it was to write is to blame."""

    text: str


@dataclass(frozen=True)
class IsReading(Message):
    """The generator is reading weights, and alive."""


@dataclass(frozen=True)
class HasEnded(Message):
    """The run has ended. There is nothing to wait for."""


class JoiningDoor:
    """Lets generators join, in threads, until it is closed.

    Args:
        choice: where to listen.
        key: the run's key.
        folder: the folder of published weights, which gets the run's address.
        welcome: what generators need.
        admit: called for each generator that has started, in a thread of its own, with the name, the connection, and
            whether it evaluates.

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
        admit: Callable[[str, Connection, bool], None],
    ):
        self.welcome, self.admit, self.folder, self.file = welcome, admit, folder, folder / JOIN_FILE
        self._has_evaluators = choice.evaluators > 0
        self._guard, self._is_open = threading.Lock(), True
        self._starting: set[Connection] = set()
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

    def _greet(self, connection: Connection) -> None:
        try:
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
            connection.send(self.welcome)
            if not self._starts(connection):
                raise EOFError
        except Exception:  # it is gone, or what it sends cannot be read
            connection.close()
            return
        self.admit(first.name, connection, first.evaluates)

    def _starts(self, connection: Connection) -> bool:
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


def _tell_end(connection: Connection) -> None:
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
